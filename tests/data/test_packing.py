"""Packs are a pure function of the item index, and a rank reads its own rows alone."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import select_anchors
from megatron_splitkv.data.packing import (
    PackedEpochs,
    feature_reader,
    final_hidden_reader,
    read_pack,
)
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import build_plan
from megatron_splitkv.testing.synthetic import make_synthetic_store

LENGTHS = np.random.default_rng(0).integers(1, 200, size=2500)


def test_every_document_exactly_once_in_each_epoch() -> None:
    packing = PackedEpochs(LENGTHS, 256, seed=3)
    item = 0
    for epoch in range(3):
        packs = [packing.pack_documents(item + i) for i in range(packing.num_packs(epoch))]
        item += len(packs)
        assert sorted(np.concatenate(packs).tolist()) == list(range(2500))
        assert max(LENGTHS[pack].sum() for pack in packs) <= 256
        assert LENGTHS.sum() / (256 * len(packs)) > 0.92  # two and a half documents a pack


def test_items_depend_on_their_index_alone() -> None:
    one = PackedEpochs(LENGTHS, 256, seed=3)
    items = [one.pack_documents(i).tolist() for i in range(1200)]
    late = PackedEpochs(LENGTHS, 256, seed=3)
    assert late.pack_documents(1199).tolist() == items[1199]
    assert late.pack_documents(7).tolist() == items[7]
    again = pickle.loads(pickle.dumps(late))
    assert again.pack_documents(600).tolist() == items[600]


def test_epochs_and_seeds_differ() -> None:
    packing = PackedEpochs(LENGTHS, 256, seed=3)
    other = PackedEpochs(LENGTHS, 256, seed=4)
    first = packing.num_packs(0)
    assert packing.pack_documents(0).tolist() != packing.pack_documents(first).tolist()
    assert packing.pack_documents(0).tolist() != other.pack_documents(0).tolist()
    # Not only the order of packs: documents meet other documents.
    epochs = [
        {frozenset(packing.pack_documents(i).tolist()) for i in range(first)},
        {frozenset(packing.pack_documents(first + i).tolist()) for i in range(first)},
    ]
    assert len(epochs[0] & epochs[1]) < 0.3 * first


def _first_epoch(packing: PackedEpochs) -> list[np.ndarray]:
    return [packing.pack_documents(i) for i in range(packing.num_packs(0))]


def test_an_anchor_budget_holds_and_drops_nothing() -> None:
    packing = PackedEpochs(LENGTHS, 1024, seed=3, num_anchors=20, max_anchors=160)
    anchors = np.minimum(LENGTHS - 1, 20)
    packs = _first_epoch(packing)
    assert sorted(np.concatenate(packs).tolist()) == list(range(2500))
    assert max(anchors[pack].sum() for pack in packs) <= 160
    assert max(LENGTHS[pack].sum() for pack in packs) <= 1024
    unbound = _first_epoch(PackedEpochs(LENGTHS, 1024, seed=3, num_anchors=20))
    assert max(anchors[pack].sum() for pack in unbound) > 160
    assert anchors.sum() / (160 * len(packs)) > 0.95


def test_a_document_above_the_anchor_budget_has_a_pack_of_its_own() -> None:
    lengths = np.array([50, 9, 50, 5, 1, 50])
    packs = _first_epoch(PackedEpochs(lengths, 100, seed=0, num_anchors=30, max_anchors=12))
    holding = [set(pack.tolist()) - {4} for pack in packs]  # document 4 has no anchor
    assert [{0}, {2}, {5}, {1, 3}] == sorted(holding, key=lambda pack: (len(pack), min(pack)))
    assert sum(map(len, packs)) == 6
    with pytest.raises(ConfigError, match="--max-anchors-per-pack 0 is too small"):
        PackedEpochs(lengths, 100, seed=0, max_anchors=0)


def test_a_budget_that_never_binds_changes_no_pack() -> None:
    free = _first_epoch(PackedEpochs(LENGTHS, 256, seed=3, num_anchors=7))
    wide = _first_epoch(PackedEpochs(LENGTHS, 256, seed=3, num_anchors=1, max_anchors=10**9))
    assert all(map(np.array_equal, free, wide))


def test_packs_are_mixed_and_no_place_prefers_long_documents() -> None:
    packing = PackedEpochs(LENGTHS, 1024, seed=3)
    packs = _first_epoch(packing)
    assert max(map(len, packs)) < 3 * np.mean([len(pack) for pack in packs])
    difference = [LENGTHS[pack[0]] - LENGTHS[pack[-1]] for pack in packs]
    assert abs(np.mean(difference)) < 3 * np.std(difference) / len(packs) ** 0.5


def test_document_longer_than_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="document 1 has 65 tokens, more than --seq-length 64"):
        PackedEpochs(np.array([64, 65]), 64, seed=0)
    with pytest.raises(ConfigError, match="no document"):
        PackedEpochs(np.array([]), 64, seed=0)


def test_pack_lays_documents_end_to_end(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [7, 5, 2], prompt_length=2)
    pack = read_pack(store, np.array([2, 0]))
    assert pack.document_ids.tolist() == [2, 0]
    assert pack.cu_seqlens.tolist() == [0, 2, 9]
    np.testing.assert_array_equal(
        pack.token_ids, np.concatenate([store.token_ids(2), store.token_ids(0)])
    )
    assert pack.loss_mask.tolist() == [False] * 4 + [True] * 5
    assert pack.token_ids.dtype == np.int64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt"])
def test_a8_a_rank_reads_exactly_its_own_rows(
    tmp_path: Path, dtype: str, cp_size: int, strategy: str
) -> None:
    store = make_synthetic_store(tmp_path / "s", [7, 5, 2] * 10 + [61, 130], dtype=dtype)
    pack = read_pack(store, np.random.default_rng(1).permutation(len(store)))
    whole = torch.cat([store.read_features(i, 0, store.lengths[i]) for i in pack.document_ids])
    layout = select_anchors(
        pack.loss_mask,
        pack.cu_seqlens,
        num_anchors=3,
        block_size=4,
        seed=0,
        step=0,
        sample_ids=pack.document_ids,
    )
    plan = build_plan(layout, len(pack.token_ids), cp_size, strategy=strategy)
    row_bytes = whole.element_size() * whole.shape[1]
    read = 0
    for rank in range(cp_size):
        mine = FeatureStore(tmp_path / "s")
        features = feature_reader(mine, pack)(plan.row_ranges(rank))
        assert torch.equal(features, whole[torch.from_numpy(plan.rows(rank))])
        assert mine.bytes_read == plan.num_rows(rank) * row_bytes
        read += mine.bytes_read
    assert read == whole.numel() * whole.element_size()


def test_the_kernel_moves_only_a_rank_s_bytes(tmp_path: Path) -> None:
    # Not the store's own count: what the operating system says that this process read.
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("needs Linux's per-process read counter")
    store = make_synthetic_store(
        tmp_path / "s", [4000, 4000], hidden_size=64, max_shard_bytes=1 << 30
    )
    pack = read_pack(store, np.array([1, 0]))
    read = feature_reader(store, pack)

    def bytes_read() -> int:
        return int(counters.read_text().split("rchar:")[1].split()[0])

    before = bytes_read()
    read(np.array([[100, 300], [3900, 4100], [7000, 7600]]))
    moved = bytes_read() - before
    assert 1000 * 512 <= moved < 1000 * 512 + 4096


def test_calls_and_bytes_of_a_pack_of_short_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A positioned read for each document and tensor, and for each range; nothing else is read."""
    lengths = np.random.default_rng(2).integers(2, 40, size=200)
    store = make_synthetic_store(tmp_path / "s", lengths.tolist())
    documents = np.random.default_rng(3).permutation(200)[:64]
    preadv, asked = os.preadv, []

    def counted(handle: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(len(buffer) for buffer in buffers))
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    pack = read_pack(store, documents)
    tokens = int(lengths[documents].sum())
    assert (len(asked), sum(asked)) == (64 + 64, tokens * (4 + 1))
    assert store.bytes_read == 0  # of features
    for ranges, calls, rows in (
        ([[0, tokens]], 64, tokens),
        ([[0, 1], [tokens - 1, tokens]], 2, 2),
        ([[5, 5], [tokens, tokens]], 0, 0),
    ):
        asked.clear()
        store.bytes_read = 0
        feature_reader(store, pack)(np.array(ranges))
        assert (len(asked), sum(asked), store.bytes_read) == (calls, rows * 64, rows * 64)


def test_ranges_of_every_kind_are_read(tmp_path: Path) -> None:
    """Against the whole pack: empty, on bounds of documents, over several, in any order."""
    store = make_synthetic_store(tmp_path / "s", [7, 1, 5, 2, 1, 9], final_hidden=True)
    pack = read_pack(store, np.array([3, 0, 5, 1, 2]))
    total = int(pack.cu_seqlens[-1])
    for reader, read_rows in (
        (feature_reader(store, pack), store.read_features),
        (final_hidden_reader(store, pack), store.read_final_hidden),
    ):
        whole = torch.cat([read_rows(int(i), 0, store.lengths[i]) for i in pack.document_ids])
        generator = np.random.default_rng(4)
        for count in (1, 2, 3, 40):
            ranges = np.sort(generator.integers(0, total + 1, size=(count, 2)), axis=1)
            expected = torch.cat([whole[start:stop] for start, stop in ranges.tolist()])
            assert torch.equal(reader(ranges), expected)


def test_rows_outside_the_pack_are_refused(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [7, 5])
    read = feature_reader(store, read_pack(store, np.array([0])))
    with pytest.raises(IndexError):
        read(np.array([[5, 8]]))
    assert read(np.zeros((0, 2), dtype=np.int64)).shape == (0, 16)


def test_a_store_and_its_reader_survive_pickling(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [7, 5])
    expected = store.read_features(1, 0, 5)
    again = pickle.loads(pickle.dumps(store))
    assert again.bytes_read == 0
    assert torch.equal(again.read_features(1, 0, 5), expected)
