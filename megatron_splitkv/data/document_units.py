"""Documents of a corpus as work units: each a file of documents, in the order of the samples."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import safetensors
import safetensors.torch
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Sample
from megatron_splitkv.data.partial import write_aside
from megatron_splitkv.data.target import Progress

_CHECKSUM = "sha256"


@dataclass(frozen=True)
class Answered:
    """What became of one sample, or of one prompt.

    Args:
        encoded: the document, or None if the target said nothing that can be drafted.
        cut: the last answer reached the longest length without an end.
    """

    encoded: Encoded | None
    cut: bool = False


class DocumentUnits(ABC):
    """How the making of a recipe's documents is shared out.

    Attributes:
        stage: name of the work, and of the folder of its files.
    """

    stage: ClassVar[str]

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Samples of each unit."""

    @abstractmethod
    def make(self, unit: int, progress: Progress) -> list[Answered]:
        """The documents of one unit; a pure function of its number."""

    def write(self, folder: Path, unit: int, progress: Progress) -> None:
        """Make one unit's documents and publish their file."""
        tensors = _to_tensors(self.make(unit, progress))
        content = safetensors.torch.save(tensors, {_CHECKSUM: _checksum(tensors)})
        write_aside(unit_file(folder, unit), content)

    def read(self, folder: Path) -> Iterator[Answered]:
        """All documents, in the order of the samples; every unit must be there.

        Raises:
            ConfigError: a unit's file is not what was written.
        """
        for unit in range(len(self.sizes)):
            yield from _from_tensors(_load(unit_file(folder, unit)))


def unit_file(folder: Path, unit: int) -> Path:
    """The file of one unit."""
    return folder / f"unit-{unit:06d}.safetensors"


def _load(path: Path) -> dict[str, torch.Tensor]:
    problem = "its checksum is another one than when it was written"
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if (file.metadata() or {}).get(_CHECKSUM) == _checksum(tensors):
                return tensors
    except safetensors.SafetensorError as error:
        problem = str(error)
    raise ConfigError(
        f"{path} is damaged ({problem}); remove it and start the same command again, which makes "
        "it anew"
    )


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy())
    return digest.hexdigest()


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
