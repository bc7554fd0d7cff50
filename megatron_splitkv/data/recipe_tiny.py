"""`prepare --target tiny`: train the target, let it speak, keep what its layers said."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Prompt, supervised
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.feature_units import TargetStates
from megatron_splitkv.data.meta import StoreMeta, TargetInfo, check_target_layer_ids
from megatron_splitkv.data.partial import folder_written_aside
from megatron_splitkv.data.prepare import PrepareOptions
from megatron_splitkv.data.prepare_job import Json, PrepareJob
from megatron_splitkv.data.prepare_target import PrepareTarget
from megatron_splitkv.data.sample_stores import CorpusEntry
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress, target_checksum
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.text import TextFile
from megatron_splitkv.data.tiny_target import (
    MASK_TOKEN_ID,
    TinyTargetConfig,
    save_tiny_target,
    train_tiny_target,
)

_PROMPT_BYTES = 32
_RESPONSE_BYTES = 96
_VALID_DOCUMENTS = 64
_PROMPTS = 48
_BATCH = 256


@dataclass(frozen=True)
class TinyBudget:
    """How much the recipe does.

    Args:
        steps: training steps of the target.
        documents: greedy continuations in the training store.
    """

    steps: int = 900
    documents: int = 2048

    @classmethod
    def for_minutes(cls, minutes: float) -> Self:
        """A budget that leaves most of a whole quick start of that length to the drafter."""
        return cls(
            steps=int(min(6000, max(20, 90 * minutes))),
            documents=int(min(16384, max(32, 204.8 * minutes))),
        )


@dataclass
class TinyRecipe:
    """A byte-level model that is trained on the spot, and its greedy continuations of its text.

    Args:
        text: training and held-out text.
        budget: how much to do.
        seed: of the target's weights and of which text is taken.
    """

    text: list[TextFile]
    budget: TinyBudget
    seed: int = 0

    target: ClassVar[None] = None

    def options(self) -> Json:
        """Budget and seed."""
        return {"target": "tiny", "seed": self.seed} | asdict(self.budget)

    def check(self, options: PrepareOptions) -> None:
        """Refuse taps that the target cannot have, another mask token, and too little text."""
        if options.mask_token_id is not None:
            raise ConfigError("--mask-token-id does not apply to tiny: it has its own mask token")
        if options.target_layer_ids is not None:
            check_target_layer_ids(options.target_layer_ids, self._config.num_layers)
        # Before the minutes of training, not after.
        _ = self._prompts

    def inputs(self, stages: Stages) -> Json:
        """A checksum of the text."""
        return {"text": text_checksum(self.text)}

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        """Train the target and save it."""
        with stages.stage("train target") as progress:
            model, loss = train_tiny_target(
                _joined(self.text, held_out=False), self._config, progress
            )
        # A kill may have come between the target and the record that says that it is there.
        shutil.rmtree(target_folder, ignore_errors=True)
        with folder_written_aside(target_folder) as aside:
            save_tiny_target(model, aside)
        return {
            "target_parameters": sum(p.numel() for p in model.parameters()),
            "target_loss": round(loss, 4),
            "mask_token": "byte-level id 257, no byte",
        }, {}

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        """From what was saved."""
        return target.outline.info("tiny", target_checksum(target.path), MASK_TOKEN_ID)

    def units(
        self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json
    ) -> AnswerUnits:
        """Continuations of both stores' prompts."""
        spoken = self._prompts[0] + self._prompts[1]

        def answer(first: int, last: int, progress: Progress) -> list[Answered]:
            asked = spoken[first:last]
            responses = respond(
                target.model, asked, _RESPONSE_BYTES, batch_size=_BATCH, progress=progress
            )
            samples = [
                supervised(torch.cat(pair), _PROMPT_BYTES)
                for pair in zip(asked, responses, strict=True)
            ]
            return [Answered(Encoded(sample, _PROMPT_BYTES)) for sample in samples]

        return AnswerUnits(len(spoken), _BATCH, answer)

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterator[CorpusEntry]:
        """The continuations, then prompts of held-out text that nobody answered."""
        for number, answer in enumerate(documents):
            yield CorpusEntry(
                "train" if number < self.budget.documents else "valid", answer.encoded
            )
            progress(number + 1, self.budget.documents + _VALID_DOCUMENTS)
        for number, window in enumerate(self._prompts[2]):
            text = bytes(window.tolist()).decode(errors="replace")
            yield CorpusEntry(prompt=Prompt(f"held-out-{number}", text, window.tolist()))

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        """The named layers, or two spread ones."""
        return target.outline.taps(options.target_layer_ids, 2)

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> TargetStates:
        """The target's own."""
        return TargetStates(lambda: target.model, meta, options.batch_tokens)

    @property
    def _config(self) -> TinyTargetConfig:
        return TinyTargetConfig(steps=self.budget.steps, seed=self.seed)

    @cached_property
    def _prompts(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Of the training store, of the validation store, and of the evaluation."""
        train = _windows(_joined(self.text, held_out=False), self.budget.documents, self.seed)
        held_out = _joined(self.text, held_out=True)
        unseen = _windows(held_out, _VALID_DOCUMENTS + _PROMPTS, self.seed)
        return train, unseen[:_VALID_DOCUMENTS], unseen[_VALID_DOCUMENTS:]


def text_checksum(text: list[TextFile]) -> str:
    """SHA-256 over texts and which of them are held out."""
    digest = hashlib.sha256()
    for file in text:
        content = hashlib.sha256(file.text.encode()).hexdigest()
        digest.update(f"{file.name}:{content}:{file.held_out}\n".encode())
    return digest.hexdigest()


def _joined(text: list[TextFile], *, held_out: bool) -> bytes:
    return "\n".join(file.text for file in text if file.held_out == held_out).encode()


def _windows(text: bytes, count: int, seed: int) -> list[torch.Tensor]:
    """Prompts from random places of a text, none overlapping another."""
    places = len(text) // _PROMPT_BYTES
    if places < count:
        raise ConfigError(
            f"{len(text)} bytes of text give {places} prompts of {_PROMPT_BYTES} bytes, needs "
            f"{count}; add text with --text"
        )
    picked = np.random.default_rng(seed).permutation(places)[:count] * _PROMPT_BYTES
    content = np.frombuffer(text, dtype=np.uint8)
    return [torch.from_numpy(content[i : i + _PROMPT_BYTES].astype(np.int64)) for i in picked]
