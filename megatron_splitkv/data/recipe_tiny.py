"""`prepare --target tiny`: train the target, let it speak, keep what its layers said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import (
    StoreMeta,
    check_target_layer_ids,
    default_target_layer_ids,
)
from megatron_splitkv.data.prepare import Corpus, Prompt, Stages, supervised, write_run
from megatron_splitkv.data.target import describe_target, greedy_responses
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


def prepare_tiny(
    output: Path,
    text: list[TextFile],
    *,
    budget: TinyBudget,
    target_layer_ids: tuple[int, ...] | None,
    dtype: str,
    final_hidden: bool,
    seed: int,
    stages: Stages,
) -> dict[str, Any]:
    """Prepare a run folder with the tiny target.

    Args:
        output: from `open_output`.
        text: training and held-out text.
        budget: how much to do.
        target_layer_ids: tapped layers; two spread ones when None.
        dtype: dtype of the features on disk.
        final_hidden: store what the target's head reads, too.
        seed: of the target's weights and of which text is taken.
        stages: clock and watcher.

    Returns:
        The summary.
    """
    training = _joined(text, held_out=False)
    held_out = _joined(text, held_out=True)
    config = TinyTargetConfig(steps=budget.steps, seed=seed)
    taps = target_layer_ids or default_target_layer_ids(config.num_layers, 2)
    # Before the minutes of training, not after.
    check_target_layer_ids(taps, config.num_layers)
    prompts = _windows(training, budget.documents, seed)
    unseen = _windows(held_out, _VALID_DOCUMENTS + _PROMPTS, seed)

    with stages.stage("train target") as progress:
        model, loss = train_tiny_target(training, config, progress)
    folder = output / "target"
    save_tiny_target(model, folder)
    meta = StoreMeta(
        describe_target(model, folder, "tiny", MASK_TOKEN_ID), taps, dtype, final_hidden
    )
    with stages.stage("respond") as progress:
        spoken = [*prompts, *unseen[:_VALID_DOCUMENTS]]
        responses = greedy_responses(
            model, spoken, _RESPONSE_BYTES, batch_size=_BATCH, progress=progress
        )
    samples = [
        supervised(torch.cat(pair), _PROMPT_BYTES) for pair in zip(spoken, responses, strict=True)
    ]
    corpus = Corpus(
        train=samples[: len(prompts)],
        valid=samples[len(prompts) :],
        prompts=[
            Prompt(
                id=f"held-out-{number}",
                text=bytes(window.tolist()).decode(errors="replace"),
                token_ids=window.tolist(),
            )
            for number, window in enumerate(unseen[_VALID_DOCUMENTS:])
        ],
    )
    facts = {
        "target_parameters": sum(p.numel() for p in model.parameters()),
        "target_loss": round(loss, 4),
        "mask_token": "byte-level id 257, no byte",
    }
    return write_run(output, model, folder, meta, corpus, stages, facts)


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
