"""A unit's file gives what was written, or says that it does not."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import supervised
from megatron_splitkv.data.document_units import Answered, DocumentUnits, unit_file
from megatron_splitkv.data.target import Progress, silent

DOCUMENTS = [
    Answered(Encoded(supervised(torch.arange(9), 4), 4, truncated=3, rewritten=1), cut=True),
    Answered(None, cut=True),
    Answered(None),
    Answered(Encoded(supervised(torch.tensor([7]), 0))),
]


class Units(DocumentUnits):
    stage = "test"

    @property
    def sizes(self) -> Sequence[int]:
        return [3, 1]

    def make(self, unit: int, progress: Progress) -> list[Answered]:
        return DOCUMENTS[3:] if unit else DOCUMENTS[:3]


def read(folder: Path) -> tuple[str | None, list[bool]]:
    """The line with which the units are refused, or what they hold of `Answered.cut`."""
    try:
        return None, [each.cut for each in Units().read(folder)]
    except ConfigError as error:
        return str(error), []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for unit in (1, 0):
        Units().write(tmp_path, unit, silent)
    return tmp_path


def test_documents_come_back_in_order(folder: Path) -> None:
    for found, written in zip(Units().read(folder), DOCUMENTS, strict=True):
        assert found.cut == written.cut
        assert (found.encoded is None) == (written.encoded is None)
        if found.encoded is not None and written.encoded is not None:
            assert torch.equal(found.encoded.sample.token_ids, written.encoded.sample.token_ids)
            assert torch.equal(found.encoded.sample.loss_mask, written.encoded.sample.loss_mask)
            assert found.encoded.prompt_tokens == written.encoded.prompt_tokens
            assert found.encoded.truncated == written.encoded.truncated
            assert found.encoded.rewritten == written.encoded.rewritten


def test_every_flipped_bit_is_found(folder: Path) -> None:
    path = unit_file(folder, 0)
    content = path.read_bytes()
    for byte in range(len(content)):
        path.write_bytes(content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :])
        line, found = read(folder)
        if line is None:  # in white space of the header, or in what nobody reads
            assert found == [each.cut for each in DOCUMENTS]
            assert byte < len(content) - 9 * 5 - 3 * 5 * 8
        else:
            assert line.startswith(f"{path} is damaged (")
            assert "\n" not in line


def test_a_file_that_is_cut_short_is_named(folder: Path) -> None:
    path = unit_file(folder, 1)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"unit-000001\.safetensors is damaged \("):
        list(Units().read(folder))
