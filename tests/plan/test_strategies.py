from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.pricing import price_chunks
from megatron_splitkv.plan.strategies import (
    _serve_by_heap,
    assign_lpt,
    equal_chunks,
    recut,
    zigzag_chunks,
)
from tests.plan.layouts import a13_layout, fig5_layout, layout_of, random_layout

STRATEGIES = ("none", "zigzag", "lpt", "balanced")


def drawn(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True)


def assign_lpt_naive(chunk_work, cp_size, chunks_per_rank):
    """Section 4.2 read aloud, without a heap."""
    left = list(range(len(chunk_work)))
    load, count = [0] * cp_size, [0] * cp_size
    owner = [-1] * len(chunk_work)
    while left:
        chunk = max(left, key=lambda j: (chunk_work[j], -j))
        free = [p for p in range(cp_size) if count[p] < chunks_per_rank]
        rank = min(free, key=lambda p: (load[p], p))
        owner[chunk] = rank
        load[rank] += chunk_work[chunk]
        count[rank] += 1
        left.remove(chunk)
    return owner


def test_fig5_zigzag():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4, strategy="zigzag")
    assert plan.context_work.tolist() == [24, 24, 30, 34]
    assert plan.work.tolist() == [32, 32, 38, 42]
    assert round(1 + plan.imbalance, 3) == 1.167


def test_fig5_lpt():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=3)
    assert plan.chunk_work.tolist() == [16, 16, 16, 12, 12, 6, 0, 0, 16, 12, 6, 0]
    assert plan.context_work.tolist() == [28, 28, 28, 28]
    assert plan.work.tolist() == [36, 36, 36, 36]
    assert plan.imbalance == 0.0


def test_a13_contiguous_rows_are_uneven():
    layout, length = a13_layout()
    plan = build_plan(layout, length, 4, strategy="none", chunks_per_rank=4)
    assert plan.context_work.sum() == 1_179_648
    assert plan.context_work.tolist() == [647168, 385024, 122880, 24576]
    assert round(plan.context_work.max() / plan.context_work.mean(), 3) == 2.194
    assert round(1 + plan.imbalance, 3) == 2.178  # own blocks included


def test_a13_zigzag_blind_to_documents_is_uneven():
    """The neighbour's layout: 2P chunks of the pack. Per document, as here, it is even."""
    layout, length = a13_layout()
    blind = price_chunks(layout, equal_chunks(length, 8))
    mirrored = blind[:4] + blind[:3:-1]
    assert mirrored.max() / mirrored.mean() == 1.25
    assert build_plan(layout, length, 4, strategy="zigzag").imbalance == 0.0


def test_a13_lpt_with_chunks_of_256():
    """1.062 needs more than J chunks on a rank; the paper's cap of J = 4 yields 1.083."""
    layout, length = a13_layout()
    plan = build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=4)
    assert plan.context_work.tolist() == [319488, 303104, 286720, 270336]
    assert round(plan.context_work.max() / plan.context_work.mean(), 4) == 1.0833
    assert round(1 + plan.imbalance, 4) == 1.0822
    uncapped = assign_lpt(plan.chunk_work, 4, chunks_per_rank=16)
    load = np.bincount(uncapped, weights=plan.chunk_work)
    assert load.max() / load.mean() == 1.0625
    assert np.bincount(uncapped).max() > 4


@pytest.mark.parametrize("strategy", ["lpt", "balanced"])
def test_a13_default_chunks_are_balanced(strategy):
    layout, length = a13_layout()
    plan = build_plan(layout, length, 4, strategy=strategy)
    assert plan.context_work.max() / plan.context_work.mean() <= 1.07
    assert 1 + plan.imbalance <= 1.07


@pytest.mark.parametrize(("length", "cp_size"), [(2000, 8), (4096, 32), (8192, 64), (300, 4)])
def test_short_packs_are_balanced_by_default(length, cp_size):
    """Fewer rows a rank than two kernel tiles: chunks are cut shorter, not balance given up."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        anchors = np.sort(rng.choice(np.arange(length // 4, length - 1), 60, replace=False))
        layout = BlockLayout(anchors, np.zeros(60, np.int64), np.ones(60, bool), 16)
        plan = build_plan(layout, length, cp_size)
        assert plan.imbalance < 0.05
        assert build_plan(layout, length, cp_size, chunks_per_rank=1).imbalance > 0.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a13_every_rank_computes_the_same_plan(strategy):
    layout, length = a13_layout()
    assert len({build_plan(layout, length, 4, strategy=strategy).digest for _ in range(4)}) == 1


@st.composite
def chunk_prices(draw):
    """(prices, P, J): ties, zeros, long tails, prices alike, beyond float64; not always P * J."""
    cp_size, per_rank = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    full = cp_size * per_rank
    count = draw(st.sampled_from([full, full, draw(st.integers(0, full))]))
    low, high = draw(st.sampled_from([(0, 3), (0, 100), (90, 100), (0, 10**9), (0, 2**54)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    work = rng.integers(low, high, count)
    work[rng.random(count) < draw(st.sampled_from([0, 0, 0.5]))] = 0
    if draw(st.booleans()):
        work = (work.astype(float) ** 3 / max(1, high) ** 2).astype(np.int64)
    return work, cp_size, per_rank


@drawn(150)
@given(chunk_prices())
@example((np.array([2, 0, 0, 5, 1, 5, 2, 6]), 2, 4))  # a rank as loaded as the next: a tie
def test_lpt_equals_naive(prices):
    work, cp_size, per_rank = prices
    owner = assign_lpt(work, cp_size, per_rank)
    assert owner.tolist() == assign_lpt_naive(work.tolist(), cp_size, per_rank)
    if work.size == cp_size * per_rank:
        assert np.bincount(owner, minlength=cp_size).tolist() == [per_rank] * cp_size


def test_lpt_in_rounds_and_by_heap_are_both_met():
    """Alike prices are served in rounds to the end, uneven ones leave them at once."""
    work = np.random.default_rng(0).integers(900, 1000, 8 * 16)
    heap = Mock(side_effect=_serve_by_heap)
    with patch("megatron_splitkv.plan.strategies._serve_by_heap", heap):
        alike = assign_lpt(work, 8, 16)
        assert not heap.called
        long_tailed = (work - 899) ** 4
        uneven = assign_lpt(long_tailed, 8, 16)
        assert 0 < heap.call_args.args[0].size < work.size
    assert alike.tolist() == assign_lpt_naive(work.tolist(), 8, 16)
    assert uneven.tolist() == assign_lpt_naive(long_tailed.tolist(), 8, 16)


def test_lpt_compares_loads_beyond_float64():
    """Loads that differ by one pair at 2^60 are still told apart."""
    big = 2**60
    work = np.array([big + 1, big, 1, 0], dtype=np.int64)
    assert assign_lpt(work, 2, 2).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 7, 16])
def test_every_row_is_owned_once(strategy, cp_size):
    for seed in range(8):
        layout, length = random_layout(seed)
        plan = build_plan(layout, length, cp_size, strategy=strategy)
        rows = np.concatenate([plan.rows(rank) for rank in range(cp_size)])
        np.testing.assert_array_equal(np.sort(rows), np.arange(length))
        blocks = np.concatenate([plan.blocks(rank) for rank in range(cp_size)])
        np.testing.assert_array_equal(blocks, np.arange(plan.layout.num_blocks))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_a8_documents_that_cp_does_not_divide(strategy, cp_size):
    layout, length = layout_of([(7, [3, 5], 0), (5, [2, 3], 0), (2, [1], 1)], block_size=4)
    plan = build_plan(layout, length, cp_size, strategy=strategy)
    rows = np.concatenate([plan.rows(rank) for rank in range(cp_size)])
    assert sorted(rows.tolist()) == list(range(14))
    assert plan.context_work.sum() == 4 * (3 + 5 + 2 + 3 + 1)


def test_zigzag_of_documents_of_any_length():
    bounds, owner = zigzag_chunks(np.array([0, 7, 8, 24]), 2)
    assert bounds.tolist() == [0, 1, 3, 5, 7, 7, 7, 7, 8, 12, 16, 20, 24]
    assert owner.tolist() == [0, 1, 1, 0] * 3


def test_zigzag_cuts_documents_without_anchors_and_tail_rows():
    layout, length = layout_of([(8, [4], 0), (8, [], 1), (8, [2], 0)], block_size=2)
    plan = build_plan(layout, length + 4, 2, strategy="zigzag")
    assert plan.rows(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 18, 25, 26, 27]


def test_recut_keeps_rows_and_counts_chunks():
    bounds, owner = zigzag_chunks(np.array([0, 7, 8, 40]), 2)
    cuts, owners = recut(bounds, owner, 2, 5)
    assert cuts.tolist() == [0, 1, 5, 10, 16, 20, 24, 28, 32, 36, 40]
    assert np.bincount(owners).tolist() == [5, 5]
    row = np.arange(40)
    before = owner[np.searchsorted(bounds, row, side="right") - 1]
    after = owners[np.searchsorted(cuts, row, side="right") - 1]
    np.testing.assert_array_equal(before, after)
    assert (np.diff(cuts) > 0).all()
    assert recut(bounds, owner, 2, 2) is None  # rank 0 has three ranges
    assert recut(bounds, owner, 2, 21) is None  # more chunks than rows


@drawn(200)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=12), st.integers(2, 9))
def test_recut_of_more_documents_than_chunks_is_not_possible(lengths, cp_size):
    """So `balanced` need not try: rank 0 has the last chunk of every document."""
    bounds, owner = zigzag_chunks(np.append(0, np.cumsum(lengths)), cp_size)
    assert recut(bounds, owner, cp_size, len(lengths) - 1) is None


@pytest.mark.parametrize(("documents", "tried"), [(8, 1), (9, 0), (5000, 0)])
def test_balanced_cuts_no_more_than_j_documents_as_zigzag_does(documents, tried):
    """2 P chunks for each of many would cost more than all the rest."""
    layout, length = layout_of([(64, [63], 0)] + [(64, [1], 0)] * (documents - 1), block_size=4)
    with patch("megatron_splitkv.plan.planner.zigzag_chunks", Mock(wraps=zigzag_chunks)) as cut:
        assert build_plan(layout, length, 7, chunks_per_rank=8).imbalance > 1e-4
    assert cut.call_count == tried


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_context_shorter_than_the_group(strategy):
    layout, length = layout_of([(3, [1, 2], 0)], block_size=2)
    plan = build_plan(layout, length, 8, strategy=strategy)
    assert sorted(np.concatenate([plan.rows(rank) for rank in range(8)]).tolist()) == [0, 1, 2]
    assert plan.layout.num_blocks == 8
    assert plan.context_work.sum() == 2 * (1 + 2)


@pytest.mark.parametrize(
    ("length", "cp_size", "expected"),
    [
        (0, 4, 1),
        (11, 4, 2),
        (511, 4, 4),
        (3072, 4, 6),
        (4096, 4, 8),
        (16_383, 4, 31),
        (2**20, 8, 32),
    ],
)
def test_default_chunks_are_one_kernel_tile_or_longer_if_four_remain(length, cp_size, expected):
    layout = BlockLayout([], [], [], 16)
    plan = build_plan(layout, length, cp_size, strategy="lpt")
    assert plan.chunk_owner.size == cp_size * expected


@pytest.mark.parametrize("strategy", ["lpt", "none"])
def test_every_rank_receives_the_same_number_of_chunks(strategy):
    for seed in range(10):
        layout, length = random_layout(seed)
        plan = build_plan(layout, length, 3, strategy=strategy, chunks_per_rank=5)
        assert np.bincount(plan.chunk_owner, minlength=3).tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ltp"}, r"'ltp' is not known; choose one of: none, zigzag, lpt, balanced"),
        ({"cp_size": 0}, "cp_size 0 must be at least 1"),
        ({"cp_size": 2.0}, "cp_size 2.0 must be at least 1, and an int"),
        ({"cp_size": True}, "cp_size True must be at least 1, and an int"),
        ({"cp_size": "2"}, "cp_size '2' must be at least 1, and an int"),
        ({"context_length": -1}, "context_length -1 must be at least 0, and an int"),
        ({"context_length": 40.5}, "context_length 40.5 must be at least 0, and an int"),
        ({"source": "zigzag"}, "source 'zigzag' must be a RowSource"),
        ({"chunks_per_rank": 0}, "chunks_per_rank 0 must be at least 1, and an int"),
        ({"chunks_per_rank": 2.0}, "chunks_per_rank 2.0 must be at least 1, and an int"),
        ({"chunks_per_rank": True}, "chunks_per_rank True must be at least 1"),
        ({"chunks_per_rank": 7}, "7 would leave chunks empty: 24 rows on 4 ranks allow at most 6"),
        ({"windows": ()}, r"windows \(\) must have an entry for every layer"),
        ({"windows": 512}, "windows 512 must have an entry for every layer"),
        ({"windows": (None, 0)}, "window 0 must be at least 1"),
        ({"windows": (True,)}, "window True must be at least 1"),
        ({"windows": (2**70,)}, "an int of at most"),
        ({"windows": (2.5,)}, "window 2.5 must be at least 1, a query's own position, and an int"),
        ({"context_length": 20}, "beyond the context of 20 rows"),
        ({"context_length": 10}, "document starts at 16, beyond the context of 10 rows"),
    ],
)
def test_bad_input(arguments, message):
    layout, length = fig5_layout()
    call = {"context_length": length, "cp_size": 4, "strategy": "lpt"} | arguments
    with pytest.raises(ConfigError, match=message):
        build_plan(layout, **call)


def test_numpys_integers_are_integers():
    layout, length = fig5_layout()
    plan = build_plan(
        layout,
        np.int64(length),
        np.int32(4),
        chunks_per_rank=np.int8(3),
        windows=[np.int64(5), None],
    )
    same = build_plan(layout, length, 4, chunks_per_rank=3, windows=(5, None))
    assert plan.digest == same.digest
    assert plan.windows == (5, None)
    assert {type(plan.cp_size), type(plan.windows[0])} == {int}
    assert build_plan(layout, length, 4, windows=[2**62]).work.any()


def test_anchor_of_another_document_is_refused():
    layout = BlockLayout([6, 12], [0, 0], [True, True], 2)
    build_plan(layout, 16, 2)
    layout = BlockLayout([6, 12, 9], [0, 0, 8], [True, True, True], 2)
    with pytest.raises(ConfigError, match="anchor 12 does not lie in the document"):
        build_plan(layout, 16, 2)
