"""A shard is written piece by piece in any order, and appears whole or not at all."""

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.shard_writer import ShardWriter, read_sidecar

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=6, hidden_size=4, vocab_size=32, mask_token_id=31
)
META = StoreMeta(TARGET, (1, 3), final_hidden=True)
LENGTHS = (5, 3)
IDS = [torch.arange(5), torch.arange(20, 23)]
MASKS = [torch.arange(5) > 1, torch.arange(3) > 0]
FEATURES = [torch.arange(n * 8.0).view(n, 8) + 100 * n for n in LENGTHS]
FINALS = [torch.arange(n * 4.0).view(n, 4) - 100 * n for n in LENGTHS]


def _write(path: Path, pieces: list[tuple[int, int, int]]) -> ShardWriter:
    with ShardWriter(path, META, IDS, MASKS, plan="p") as writer:
        for i, start, stop in pieces:
            writer.write_rows(i, start, FEATURES[i][start:stop], FINALS[i][start:stop])
    return writer


def test_pieces_in_any_order_make_the_same_file(tmp_path: Path) -> None:
    orders = [[(0, 0, 5), (1, 0, 3)], [(1, 1, 3), (0, 4, 5), (0, 0, 4), (1, 0, 1), (0, 2, 2)]]
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, pieces in zip(files, orders, strict=True):
        _write(file, pieces)
    assert files[0].read_bytes() == files[1].read_bytes()
    with safe_open(files[1], "pt") as shard:
        assert torch.equal(shard.get_tensor("features"), torch.cat(FEATURES))
        assert torch.equal(shard.get_tensor("final_hidden"), torch.cat(FINALS))
        assert torch.equal(shard.get_tensor("token_ids"), torch.cat(IDS).int())
        assert torch.equal(shard.get_tensor("loss_mask").bool(), torch.cat(MASKS))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a.safetensors",
        "a.safetensors.json",
        "b.safetensors",
        "b.safetensors.json",
    ]


def test_the_sidecar_is_what_the_index_will_say(tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    _write(file, [(0, 0, 5), (1, 0, 3)])
    content = file.read_bytes()
    expected = {
        "file": file.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows": 8,
        "lengths": [5, 3],
    }
    assert read_sidecar(file, "p") == expected
    assert read_sidecar(file, "another plan") is None
    sidecar = tmp_path / "s.safetensors.json"
    whole = sidecar.read_text()
    for damaged in (whole.replace('"rows": 8', '"rows": 9'), whole[:-5], "[]", ""):
        sidecar.write_text(damaged)
        assert read_sidecar(file, "p") is None
    sidecar.write_text(whole)
    os.truncate(file, len(content) - 1)
    assert read_sidecar(file, "p") is None


def test_bfloat16_rows_are_rounded_as_torch_does(tmp_path: Path) -> None:
    meta = StoreMeta(TARGET, (1,), "bfloat16")
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with ShardWriter(tmp_path / "s", meta, IDS[:1], MASKS[:1]) as writer:
        writer.write_rows(0, 0, rows.t().contiguous().t())  # strided
    with safe_open(tmp_path / "s", "pt") as shard:
        assert torch.equal(shard.get_tensor("features"), rows.bfloat16())


@pytest.mark.parametrize(
    ("pieces", "place"),
    [
        ([(0, 0, 5)], "row 0 of document 8"),
        ([(0, 0, 3), (0, 4, 5), (1, 0, 3)], "row 3 of document 7"),
        ([(0, 0, 5), (1, 0, 2)], "row 2 of document 8"),
    ],
)
def test_rows_that_never_came_are_named(
    tmp_path: Path, pieces: list[tuple[int, int, int]], place: str
) -> None:
    writer = ShardWriter(tmp_path / "s", META, IDS, MASKS, first_document=7, plan="p")
    for i, start, stop in pieces:
        writer.write_rows(i, start, FEATURES[i][start:stop], FINALS[i][start:stop])
    with pytest.raises(ConfigError, match=f"s: {place} was never written"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


BAD: dict[str, Callable[[ShardWriter], None]] = {
    r"rows 4 to 6, has no such rows": lambda w: w.write_rows(0, 4, FEATURES[0][:2], FINALS[0][:2]),
    r"rows -1 to 1, has no such": lambda w: w.write_rows(0, -1, FEATURES[0][:2], FINALS[0][:2]),
    r"needs features of shape \[2, 8\]": lambda w: w.write_rows(0, 0, FINALS[0][:2], FINALS[0][:2]),
    r"states of shape \[2, 4\], got None": lambda w: w.write_rows(0, 0, FEATURES[0][:2]),
}


@pytest.mark.parametrize("message", BAD)
def test_a_piece_that_does_not_fit_is_refused_and_nothing_left(
    tmp_path: Path, message: str
) -> None:
    def write() -> None:
        with ShardWriter(tmp_path / "s", META, IDS, MASKS) as writer:
            BAD[message](writer)

    with pytest.raises(ConfigError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_checked_before_a_file_is_made(tmp_path: Path) -> None:
    for ids, masks, message in (
        ([torch.tensor([1, 32])], [torch.ones(2).bool()], "document 3 has token 32"),
        ([torch.tensor([1])], [], "needs a loss mask for each of its 1 documents, got 0"),
        ([torch.tensor([]).long()], [torch.ones(0).bool()], "document 3 is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardWriter(tmp_path / "s", META, ids, masks, first_document=3)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    """A shard of 64 MiB, written and hashed with less than 2 MiB of Python's memory."""
    width, rows = 1024, 1 << 14
    meta = StoreMeta(TargetInfo(**{**TARGET.__dict__, "hidden_size": width}), (1,))
    piece = torch.zeros(64, width)
    tracemalloc.start()
    try:
        with ShardWriter(
            tmp_path / "s", meta, [torch.zeros(rows, dtype=torch.int32)], [torch.ones(rows).bool()]
        ) as writer:
            for start in range(0, rows, 64):
                writer.write_rows(0, start, piece)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "s").stat().st_size > rows * width * 4
