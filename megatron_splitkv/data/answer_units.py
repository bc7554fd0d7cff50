"""Batches of answers as work units."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from megatron_splitkv.data.document_units import Answered, DocumentUnits
from megatron_splitkv.data.target import Progress


@dataclass(frozen=True)
class AnswerUnits(DocumentUnits):
    """How a recipe's answers are shared out.

    Args:
        prompts: how many there are.
        unit: prompts of one unit.
        answer: the answers to the prompts ``first`` to ``last``; a pure function of them.
    """

    prompts: int
    unit: int
    answer: Callable[[int, int, Progress], list[Answered]]

    stage: ClassVar[str] = "answers"

    @property
    def sizes(self) -> list[int]:
        """Prompts of each unit."""
        return [min(self.unit, self.prompts - first) for first in range(0, self.prompts, self.unit)]

    def make(self, unit: int, progress: Progress) -> list[Answered]:
        """Answer one unit's prompts."""
        first = unit * self.unit
        return self.answer(first, min(first + self.unit, self.prompts), progress)
