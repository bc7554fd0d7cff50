"""`splitkv bench store`: the exact parts, on a small store; times are not asserted."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.bench import store_rank
from megatron_splitkv.bench.memory import EXACT_MALLOC
from megatron_splitkv.bench.store import StoreBenchmark, bench_store
from megatron_splitkv.bench.store_case import (
    StoreShape,
    build_store,
    feature_bits,
    planned_packs,
)
from megatron_splitkv.bench.store_rank import rank_epoch, read_as_rank
from megatron_splitkv.bench.store_speed import read_speed
from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.store import FeatureStore

SMALL = StoreShape(documents=30, max_length=2000, width=24, cp_size=3, num_anchors=8, seed=1)
Progress = list[tuple[int, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "store"
    assert build_store(path, SMALL, lambda done, total: None) == 1
    return path


def test_the_documents_are_the_shapes() -> None:
    lengths = StoreShape().lengths()
    assert (lengths.size, lengths.max(), lengths.dtype) == (1000, 1 << 18, np.int64)
    assert 700 < np.median(lengths) < 1500
    assert lengths.min() >= 2
    assert 2e9 < lengths.sum() * StoreShape().meta.row_bytes < 3e9
    assert not np.array_equal(lengths, StoreShape(seed=1).lengths())


def test_features_are_a_function_of_document_row_and_column() -> None:
    bits = feature_bits(3, 0, 200, 16)
    np.testing.assert_array_equal(feature_bits(3, 50, 70, 16), bits[50:70])
    values = torch.from_numpy(bits).view(torch.bfloat16)
    assert values.isfinite().all()
    for other in (feature_bits(4, 0, 200, 16), feature_bits(3, 1, 201, 16), np.roll(bits, 1, 1)):
        assert (other == bits).mean() < 0.01


def test_the_store_holds_them(folder: Path) -> None:
    store = FeatureStore(folder, verify="full")
    assert store.lengths.tolist() == SMALL.lengths().tolist()
    for document in (0, 29):
        n = int(store.lengths[document])
        found = store.read_features(document, 0, n).view(torch.uint16).numpy()
        np.testing.assert_array_equal(found, feature_bits(document, 0, n, SMALL.width))


def test_ranks_read_their_rows_and_no_more(folder: Path) -> None:
    ranks = [rank_epoch(folder, SMALL, rank) for rank in range(3)]
    plans = [plan for _, plan in planned_packs(FeatureStore(folder), SMALL)]
    tokens = int(SMALL.lengths().sum())
    assert sum(rank.rows for rank in ranks) == tokens
    for rank in ranks:
        rows = [plan.num_rows(rank.rank) for plan in plans]
        assert rank.rows == sum(rows)
        assert rank.bytes_read == rank.rows * 48
        assert rank.own_bytes == max(rows) * 48
        assert rank.rows <= 1.05 * tokens / 3  # about S / P, far from S


def test_a_row_that_is_not_what_was_written_stops_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(document: int, start: int, stop: int, width: int) -> np.ndarray:
        bits = feature_bits(document, start, stop, width)
        bits[-1, -1] ^= document == 7
        return bits

    def all_ranks() -> None:
        for rank in range(3):
            rank_epoch(folder, SMALL, rank)

    monkeypatch.setattr(store_rank, "feature_bits", other)
    with pytest.raises(RuntimeError, match=r"of document 7 are not what was written"):
        all_ranks()


def test_bytes_beyond_the_own_rows_stop_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = FeatureStore.gather_features

    def wasteful(self: FeatureStore, *ranges: np.ndarray) -> torch.Tensor:
        gather(self, [0], [0], [1])
        return gather(self, *ranges)

    monkeypatch.setattr(FeatureStore, "gather_features", wasteful)
    with pytest.raises(RuntimeError, match=r"rank 0 read .* bytes of features, its .* rows have"):
        rank_epoch(folder, SMALL, 0)


@pytest.mark.parametrize("state", ["cached", "cold"])
def test_both_ways_read_the_same_rows(folder: Path, state: str) -> None:
    calls: Progress = []
    speed = read_speed(folder, SMALL, state, 2, lambda done, total: calls.append((done, total)))
    assert speed.rows == SMALL.lengths().sum()
    assert len(speed.store_seconds) == len(speed.mapping_seconds) == 2
    assert calls[-1][0] == calls[-1][1]


# In a process of its own: in one that has freed much, what is touched may be resident already.
PEAK_PROBE = """
import numpy as np
from megatron_splitkv.bench.memory import PeakMemory
peak = PeakMemory()
held = np.zeros(64 << 20, dtype=np.uint8)
assert peak.grown() < 32 << 20, "not touched yet"
held[::4096] = 1
assert 63 << 20 < peak.grown() < 96 << 20, peak.grown()
del held
peak.restart()
assert peak.grown() < 32 << 20, "forgotten"
"""


def test_peak_memory_counts_what_is_touched() -> None:
    subprocess.run(
        [sys.executable, "-c", PEAK_PROBE], check=True, timeout=300, env=os.environ | EXACT_MALLOC
    )


def test_memory_of_a_rank_is_that_of_its_own_rows(tmp_path: Path) -> None:
    """33 MB of features, a quarter of them this rank's."""
    shape = StoreShape(documents=1, max_length=1 << 17, width=128, cp_size=4)
    build_store(tmp_path / "store", shape, lambda done, total: None)
    rank = read_as_rank(tmp_path / "store", shape, 1)
    assert rank.own_bytes == rank.bytes_read == (1 << 15) * 256
    assert rank.own_bytes < rank.read_peak_bytes < 2 * rank.own_bytes
    assert rank.step_peak_bytes < 2 * rank.own_bytes


def test_the_command_prints_json_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--documents=12", "--max-length=600", "--width=8", "--cp-size=1"]
    command = ["bench", "store", *arguments, "--num-anchors=4", f"--folder={tmp_path}"]
    assert main([*command, f"--output={tmp_path / 'out'}", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    tokens = int(StoreShape(12, 600, 8).lengths().sum())
    assert content["tokens"] == content["ranks"][0]["rows"] == tokens
    assert content["ranks"][0]["bytes_read"] == tokens * 16
    assert content["num_bytes"] > tokens * (16 + 5)
    assert [speed["state"] for speed in content["speeds"]] == ["cached", "cold"]
    assert sorted(os.listdir(tmp_path)) == ["out"]  # the store is gone
    assert sorted(os.listdir(tmp_path / "out")) == ["store.json", "store.png"]


def test_the_table_names_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_splitkv.bench.store_report import print_store

    print_store(_result())
    printed = capsys.readouterr().out
    assert "growth, read" in printed
    assert "1.10x" in printed
    assert "4.00" in printed


def _result() -> StoreBenchmark:
    from megatron_splitkv.bench.store_rank import RankRead
    from megatron_splitkv.bench.store_speed import ReadSpeed

    ranks = tuple(RankRead(i, 1000, 48_000, 10_000, 11_000, 12_000) for i in range(3))
    speeds = (ReadSpeed("cached", 3000, (1.0, 1.0), (4.0, 4.0)),)
    return StoreBenchmark(SMALL, 3000, 2000, 2, 10_000, 1, 1.0, 0.5, ranks, speeds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": 0}, "documents 0 must be at least 1"),
        ({"max_length": 15}, "max_length 15 must be at least 16"),
        ({"width": 0}, "width 0 must"),
        ({"seed": -1}, "seed -1 must be at least 0"),
    ],
)
def test_bad_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreShape(**changes)


def test_a_disk_that_is_too_small_is_refused_before_a_byte(tmp_path: Path) -> None:
    shape = StoreShape(documents=1, max_length=1 << 20, width=1 << 21)
    with pytest.raises(ConfigError, match=r"4,398,\d{3},\d{3},\d{3} bytes, .* fewer --documents"):
        bench_store(shape, lambda name: nullcontext(lambda done, total: None), str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        bench_store(shape, lambda name: nullcontext(lambda *_: None), str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
