"""Batches of answers as work units: each a file of documents, in the order of the prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Sample
from megatron_splitkv.data.partial import write_aside
from megatron_splitkv.data.target import Progress


@dataclass(frozen=True)
class Answered:
    """What became of one prompt.

    Args:
        encoded: the document, or None if the target said nothing that can be drafted.
        cut: the last answer reached the longest length without an end.
    """

    encoded: Encoded | None
    cut: bool = False


@dataclass(frozen=True)
class AnswerUnits:
    """How a recipe's answers are shared out.

    Args:
        prompts: how many there are.
        unit: prompts of one unit.
        answer: the answers to the prompts ``first`` to ``last``; a pure function of them.
    """

    prompts: int
    unit: int
    answer: Callable[[int, int, Progress], list[Answered]]

    @property
    def sizes(self) -> list[int]:
        """Prompts of each unit."""
        return [min(self.unit, self.prompts - first) for first in range(0, self.prompts, self.unit)]

    def write(self, folder: Path, unit: int, progress: Progress) -> None:
        """Answer one unit's prompts and publish its file."""
        first = unit * self.unit
        answers = self.answer(first, min(first + self.unit, self.prompts), progress)
        write_aside(unit_file(folder, unit), safetensors.torch.save(_to_tensors(answers)))

    def read(self, folder: Path) -> Iterator[Answered]:
        """All answers, in the order of the prompts; every unit must be there."""
        for unit in range(len(self.sizes)):
            yield from _from_tensors(safetensors.torch.load_file(unit_file(folder, unit)))


def unit_file(folder: Path, unit: int) -> Path:
    """The file of one unit."""
    return folder / f"unit-{unit:06d}.safetensors"


def _to_tensors(answers: list[Answered]) -> dict[str, torch.Tensor]:
    """Documents side by side; one row of counts each, all zero for an answer without document."""
    documents = [answer.encoded for answer in answers if answer.encoded is not None]
    none = torch.empty(0, dtype=torch.int64)
    return {
        "token_ids": torch.cat([none, *(e.sample.token_ids for e in documents)]).int(),
        "loss_mask": torch.cat([none, *(e.sample.loss_mask for e in documents)]).to(torch.uint8),
        "counts": torch.tensor([_counts(answer) for answer in answers], dtype=torch.int64),
    }


def _counts(answer: Answered) -> list[int]:
    encoded = answer.encoded
    if encoded is None:
        return [0, 0, 0, 0, int(answer.cut)]
    return [
        encoded.sample.token_ids.numel(),
        encoded.prompt_tokens,
        encoded.truncated,
        encoded.rewritten,
        int(answer.cut),
    ]


def _from_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[Answered]:
    start = 0
    for length, prompt_tokens, truncated, rewritten, cut in tensors["counts"].tolist():
        if not length:
            yield Answered(None, bool(cut))
            continue
        rows = slice(start, start + length)
        sample = Sample(tensors["token_ids"][rows].long(), tensors["loss_mask"][rows].bool())
        yield Answered(Encoded(sample, prompt_tokens, truncated, rewritten), bool(cut))
        start += length
