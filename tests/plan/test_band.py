"""Sliding windows: exact, without work for far keys, in few levels."""

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import LeafLimits, build_plan
from megatron_splitkv.plan.band import build_band_staircase
from tests.plan.coverage import assert_disjoint_and_ascending, cells, columns, count_coverage
from tests.plan.layouts import layout_of, random_plan, shuffled, visible_in_window

NO_LEAVES = LeafLimits(rows=0, keys=0, pairs=0)
LIMITS = [
    NO_LEAVES,
    LeafLimits(rows=8, keys=3, pairs=0),
    LeafLimits(rows=12, keys=1000, pairs=10),
    LeafLimits(),
]


def windows_of(plan, seed):
    """One shorter than a block, about a block, within the documents, and longer than any."""
    size, rng = plan.block_size, np.random.default_rng(seed)
    return [
        1 + seed % max(1, size - 1),
        size + seed % 3,
        int(rng.integers(size, 40 + size)),
        int(rng.integers(90, 200)),
    ]


def assert_exact(plan, rank, window, limits, *, cast="all"):
    staircase = plan.staircase(rank, limits, window=window, cast=cast)
    size, num_keys = plan.block_size, plan.num_rows(rank)
    blocks = plan.query_cast(rank, cast, window).blocks
    rows = (blocks[:, None] * size + np.arange(size)).ravel()
    seen = visible_in_window(plan.layout, plan.rows(rank), window)[rows]

    np.testing.assert_array_equal(count_coverage(staircase, num_keys), seen)
    key = np.arange(num_keys)
    by_row = (staircase.row_start[:, None] <= key) & (key < staircase.row_end[:, None])
    np.testing.assert_array_equal(by_row, seen)
    for level in staircase.levels:
        assert len(level)
        assert_disjoint_and_ascending(level)
    leaves = staircase.leaves
    assert (np.diff(leaves.q_start) >= 0).all()
    for q0, q1, k0, k1 in columns(leaves):
        assert seen[q0 * size : q1 * size, k0:k1].any(axis=0).all()  # not one far key
        assert q0 < q1
        assert k0 < k1
    executed = size * sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in cells(staircase))
    assert staircase.needed_pairs == seen.sum()
    assert staircase.executed_pairs == executed >= staircase.needed_pairs
    if limits == NO_LEAVES:  # the triangles within blocks alone
        assert (leaves.q_end - leaves.q_start == 1).all()
        assert (leaves.k_end - leaves.k_start < size).all()
    return staircase


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_every_visible_pair_exactly_once(cp_size, limits):
    """Random documents, cuts and owners: empty shards, padding blocks, odd P, no anchors."""
    for seed in range(25):
        plan = random_plan(seed, cp_size)
        for window in windows_of(plan, seed):
            for rank in range(cp_size):
                assert_exact(plan, rank, window, limits)
                assert_exact(plan, rank, window, limits, cast="group")


@pytest.mark.parametrize("limits", LIMITS)
def test_blocks_in_any_order(limits):
    """Hand-made layouts: padding amid a document, unsorted anchors, interleaved documents."""
    for seed in range(25):
        plan = shuffled(random_plan(seed, 2), seed)
        for window in windows_of(plan, seed):
            for rank in range(2):
                assert_exact(plan, rank, window, limits)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("window", [1, 3, 7, 8, 9, 15, 16, 17, 40, 1000])
def test_overlapping_neighbours_equal_anchors_and_padding_between(window, limits):
    keep = [True] * 5 + [False] + [True] * 6
    layout = BlockLayout([3, 4, 4, 5, 5, 5, 6, 7, 9, 30, 31, 40], [0] * 12, keep, 8)
    plan = build_plan(layout, 48, 2, strategy="none")
    assert_exact(plan, 0, window, limits)
    assert_exact(plan, 1, window, limits)


@pytest.mark.parametrize("strategy", ["none", "zigzag", "balanced"])
@pytest.mark.parametrize("limits", LIMITS)
def test_many_anchors_over_long_documents(strategy, limits):
    rng = np.random.default_rng(5)
    documents = [
        (n, np.sort(rng.choice(n, n // 7, replace=False)).tolist(), 3) for n in (701, 1, 300, 513)
    ]
    layout, length = layout_of(documents, block_size=16)
    plan = build_plan(layout, length, 5, strategy=strategy, chunks_per_rank=4)
    for window in (10, 64, 250):
        for rank in range(5):
            assert_exact(plan, rank, window, limits)


def test_pairs_counted_one_by_one():
    for seed in range(40):
        plan = random_plan(seed, 2)
        window = windows_of(plan, seed)[seed % 4]
        layout, needed = plan.layout, [0, 0]
        for i in range(layout.num_blocks):
            if not layout.block_keep_mask[i]:
                continue
            anchor, start = int(layout.anchor_positions[i]), int(layout.document_starts[i])
            for slot in range(layout.block_size):
                for x in range(max(start, anchor + slot - window + 1), anchor):
                    chunk = np.searchsorted(plan.chunk_bounds, x, side="right") - 1
                    needed[plan.chunk_owner[chunk]] += 1
        assert [plan.staircase(rank, window=window).needed_pairs for rank in (0, 1)] == needed


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_needs_equal_naive(cp_size):
    for seed in range(40):
        for plan in (random_plan(seed, cp_size), shuffled(random_plan(seed, cp_size), seed)):
            for window in (1, 2, *windows_of(plan, seed)):
                expected = [
                    visible_in_window(plan.layout, plan.rows(rank), window)
                    .any(axis=1)
                    .reshape(-1, plan.block_size)
                    .any(axis=1)
                    for rank in range(cp_size)
                ]
                np.testing.assert_array_equal(plan.needs(window), expected)


def test_shape_of_a_small_band():
    """Six blocks, windows of 5 at 0, 1, 2, 3, then of the next group: cut at 5 and at 10."""
    start = np.array([0, 1, 2, 3, 5, 7])
    staircase = build_band_staircase(start, start + 5, 1, NO_LEAVES)
    assert [columns(level) for level in staircase.levels] == [
        [[0, 4, 3, 5], [4, 6, 7, 10]],  # before the cuts: what whole groups share
        [[0, 2, 1, 3], [4, 5, 5, 7]],
        [[0, 1, 0, 1], [2, 3, 2, 3]],
        [[2, 4, 5, 7], [5, 6, 10, 12]],  # behind them
        [[1, 2, 5, 6], [3, 4, 7, 8]],
    ]
    assert len(staircase.leaves) == 0
    assert staircase.executed_pairs == staircase.needed_pairs == 30


def test_a_window_that_reaches_everywhere_is_the_full_staircase():
    for seed in range(10):
        plan = random_plan(seed, 2)
        for rank in (0, 1):
            full = plan.staircase(rank, NO_LEAVES)
            band = plan.staircase(rank, NO_LEAVES, window=200)
            assert [columns(x) for x in full.levels] == [columns(x) for x in band.levels]
            assert len(band.leaves) == 0


def realistic(length, documents, anchors, block_size=16):
    rng = np.random.default_rng(1)
    return layout_of(
        [
            (
                length,
                np.sort(rng.choice(np.arange(length // 4, length), anchors, False)).tolist(),
                0,
            )
            for _ in range(documents)
        ],
        block_size=block_size,
    )


@pytest.mark.parametrize("cp_size", [1, 8, 64])
@pytest.mark.parametrize("window", [512, 1024, 2048, 4096])
@pytest.mark.parametrize(
    ("length", "documents", "anchors"),
    [(2**18, 4, 512), (2**16, 4, 512), (2**13, 8, 512), (3000, 16, 128)],
    ids=["paper's", "64k", "8k", "3k"],
)
def test_little_waste_and_few_levels(length, documents, anchors, window, cp_size):
    layout, total = realistic(length, documents, anchors)
    plan = build_plan(layout, total, cp_size)
    blocks_per_window = max(
        np.searchsorted(layout.anchor_positions, a + window) - i
        for i, a in enumerate(layout.anchor_positions)
    )
    needed = 0
    for rank in range(cp_size):
        staircase = plan.staircase(rank, window=window)
        needed += staircase.needed_pairs
        assert staircase.executed_pairs <= 1.10 * staircase.needed_pairs
        assert len(staircase.levels) <= 2 * (np.log2(blocks_per_window) + 2)
        assert all(len(level) for level in staircase.levels)
    position = layout.anchor_positions[:, None] + np.arange(16)
    first = np.maximum(layout.document_starts[:, None], position - window + 1)
    assert needed == np.maximum(layout.anchor_positions[:, None] - first, 0).sum()


def test_a_short_window_needs_few_ranks():
    layout, total = realistic(2**18, 4, 512)
    plan = build_plan(layout, total, 8)
    assert plan.needs().mean() > 0.9
    assert plan.needs(512).mean() < 0.2
    assert plan.resolve_cast("auto", 512) == "group"


def test_full_layers_are_kept_apart():
    plan = random_plan(3, 2)
    full = plan.staircase(0)
    assert plan.staircase(0, window=5) is plan.staircase(0, window=5)
    assert plan.staircase(0, window=5) is not plan.staircase(0, window=6)
    assert plan.staircase(0) is full


@pytest.mark.parametrize("window", [0, -3])
def test_windows_that_hide_a_query_from_itself_are_refused(window):
    plan = build_plan(BlockLayout([10], [0], [True], 4), 16, 2)
    for ask in (
        lambda: plan.staircase(0, window=window),
        lambda: plan.staircase(0, window=window, cast="group"),
        lambda: plan.own_staircase(0, window),
        lambda: plan.needs(window),
    ):
        with pytest.raises(ConfigError, match=f"window {window} must be at least 1"):
            ask()


def test_empty_context_and_layout():
    plan = build_plan(BlockLayout([], [], [], 4), 0, 3)
    assert plan.staircase(1, window=7).levels == []
    assert plan.needs(7).shape == (3, 0)
    unseen = build_plan(BlockLayout([0], [0], [True], 4), 1, 1)
    assert len(unseen.staircase(0, window=2).leaves) == 0
