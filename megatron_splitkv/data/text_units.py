"""Parts of a user's text as work units that tokenise it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.document_units import Answered, DocumentUnits
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.text import Place, PlacedSample, RawSample, read_from

# Bytes of text: of a unit, some ten seconds of a core, which is what a kill loses; and of a call of
# the tokenizer, whose threads share it.
_UNIT_BYTES = 1 << 24
_CALL_BYTES = 1 << 20


@dataclass(frozen=True)
class TextPart:
    """Consecutive samples that can be read without what lies before them.

    Args:
        place: where the first one begins.
        samples: how many there are.
    """

    place: Place
    samples: int


def in_parts(
    placed: Iterable[PlacedSample],
) -> Iterator[tuple[TextPart, list[RawSample]]]:
    """Cut samples into the parts that are a unit each, while they are read."""
    for group in _groups(placed, _UNIT_BYTES):
        yield TextPart(group[0].place, len(group)), [each.sample for each in group]


@dataclass(frozen=True)
class TextUnits(DocumentUnits):
    """How the tokenising of a text is shared out.

    Args:
        paths: the files.
        parts: of all samples, in order, from `in_parts`.
        encode: tokenises consecutive samples.
    """

    paths: Sequence[Path]
    parts: Sequence[TextPart]
    encode: Callable[[Sequence[RawSample]], Sequence[Encoded]]

    stage: ClassVar[str] = "tokenise"

    @property
    def sizes(self) -> list[int]:
        """Samples of each unit."""
        return [part.samples for part in self.parts]

    def make(self, unit: int, progress: Progress) -> list[Answered]:
        """Tokenise one part.

        Raises:
            ConfigError: naming the sample, if it cannot be encoded; or the text is no longer what
                it was when the job began.
        """
        part = self.parts[unit]
        documents: list[Answered] = []
        placed = islice(read_from(self.paths, part.place), part.samples)
        for group in _groups(placed, _CALL_BYTES):
            encoded = self.encode([each.sample for each in group])
            documents += [Answered(document) for document in encoded]
            progress(len(documents), part.samples)
        if len(documents) != part.samples:
            raise ConfigError(
                f"{self.paths[part.place.file]} has {len(documents)} samples from line "
                f"{part.place.line} on, and had {part.samples} when this prepare began; do not "
                "change the text meanwhile, and prepare with --overwrite"
            )
        return documents


def _groups(placed: Iterable[PlacedSample], least_bytes: int) -> Iterator[list[PlacedSample]]:
    """Consecutive samples of that many bytes or a little more; the last group may have fewer."""
    group: list[PlacedSample] = []
    size = 0
    for each in placed:
        group.append(each)
        size += each.size
        if size >= least_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
