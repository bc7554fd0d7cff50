import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.pricing import (
    cumulative_context_work,
    price_chunks,
    price_chunks_in_tiles,
    price_own_blocks,
    price_own_blocks_in_tiles,
)
from tests.plan.layouts import fig5_layout, random_layout, visible, visible_in_window

MIXTURES = [(1,), (3,), (40,), (1000,), (None, 5), (None, None, 2, 9, 9, None), (7,) * 4]


def seen_by_rows(layout, rows, window):
    """bool[N * B, len(rows)]."""
    if window is None:
        return visible(layout, rows).repeat(layout.block_size, axis=0)
    return visible_in_window(layout, rows, window)


def price_chunks_naive(layout, bounds):
    """Count visible (query row, key) pairs chunk by chunk."""
    return np.array(
        [
            layout.block_size * visible(layout, np.arange(start, end)).sum()
            for start, end in pairwise(bounds)
        ],
        dtype=np.int64,
    )


def price_chunks_exact(layout, bounds):
    """The same in unbounded Python integers, for contexts that no row loop could walk."""
    kept = [
        (int(s), int(a))
        for s, a, keep in zip(
            layout.document_starts,
            layout.anchor_positions,
            layout.block_keep_mask,
            strict=True,
        )
        if keep
    ]
    return [
        layout.block_size * sum(max(0, min(a, end) - max(s, start)) for s, a in kept)
        for start, end in pairwise(bounds.tolist())
    ]


@pytest.mark.parametrize("seed", range(30))
def test_equals_naive_count(seed):
    layout, length = random_layout(seed)
    rng = np.random.default_rng(seed)
    bounds = np.unique(np.concatenate([[0, length], rng.integers(0, length + 1, 9)]))
    np.testing.assert_array_equal(price_chunks(layout, bounds), price_chunks_naive(layout, bounds))


def test_positions_in_any_order_and_blocks_in_any_order():
    layout, length = fig5_layout()
    shuffled = np.random.default_rng(0).permutation(layout.num_blocks)
    mixed = BlockLayout(
        layout.anchor_positions[shuffled],
        layout.document_starts[shuffled],
        layout.block_keep_mask[shuffled],
        layout.block_size,
    )
    backwards = np.arange(length, -1, -1)
    forwards = cumulative_context_work(layout, np.arange(length + 1))
    np.testing.assert_array_equal(cumulative_context_work(mixed, backwards), forwards[::-1])


def test_fig5_costs_per_position():
    layout, length = fig5_layout()
    per_position = price_chunks(layout, np.arange(length + 1)).tolist()
    assert per_position[:16] == [8] * 6 + [6] * 4 + [4, 2] + [0] * 4
    assert per_position[16:] == [8, 8, 6, 6, 4, 2, 0, 0]


def test_padding_blocks_cost_nothing():
    layout = BlockLayout([90, 50], [0, 0], [False, True], 4)
    np.testing.assert_array_equal(price_chunks(layout, np.array([0, 50, 100])), [200, 0])


def test_exact_beyond_int32_and_float64():
    length = 64 * 2**20
    rng = np.random.default_rng(3)
    anchors = np.sort(rng.choice(length, 20_000, replace=False))
    layout = BlockLayout(anchors, np.zeros(anchors.size, int), np.ones(anchors.size, bool), 33)
    bounds = np.array([0, 1, 2**25 + 1, length - 3, length])
    price = price_chunks(layout, bounds)
    assert price.dtype == np.int64
    assert price.tolist() == price_chunks_exact(layout, bounds)
    assert price.max() > 2**42  # far beyond int32; one odd pair must not be lost


def test_sixty_four_million_rows_are_never_materialised():
    length = 64 * 2**20
    anchors = np.arange(1, 513) * (length // 513)
    layout = BlockLayout(anchors, np.zeros(512, int), np.ones(512, bool), 16)
    tracemalloc.start()
    plan = build_plan(layout, length, 8, strategy="lpt")
    staircase = plan.staircase(3)
    _ = plan.digest, plan.row_ranges(3), plan.num_rows(3), plan.work
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert staircase.needed_pairs == plan.context_work[3] > 2**31


@pytest.mark.parametrize("windows", MIXTURES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_windows_equal_naive_count(seed, windows):
    """A mixture of layers costs the sum of its layers, pair by pair."""
    layout, length = random_layout(seed)
    rng = np.random.default_rng(seed)
    bounds = np.unique(np.concatenate([[0, length], rng.integers(0, length + 1, 9)]))
    expected = [
        sum(seen_by_rows(layout, np.arange(start, end), w).sum() for w in windows)
        for start, end in pairwise(bounds)
    ]
    assert price_chunks(layout, bounds, windows).tolist() == expected


@pytest.mark.parametrize("windows", [(None,), *MIXTURES], ids=str)
def test_own_blocks_equal_naive_count(windows):
    for size in (1, 2, 5, 16):
        slot = np.arange(size)
        block = sum(
            size**2
            if window is None
            else ((slot[:, None] >= slot) & (slot[:, None] - slot < window)).sum()
            for window in windows
        )
        layout = BlockLayout([9] * 6, [0] * 6, [True, False, True, True, False, False], size)
        own = price_own_blocks(layout, 3, windows)
        assert own.tolist() == [block, 2 * block, 0]


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 300, 300)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_tiles_equal_naive_count(seed, windows):
    """128 keys at a time from each chunk's start: rows that see one of them, in whole tiles."""
    layout, length = random_layout(seed, max_length=900, max_anchors=60, block_size=16)
    cuts = np.random.default_rng(seed).integers(0, length + 1, 4)
    bounds = np.sort(np.concatenate([[0, length], cuts]))
    expected = []
    for start, end in pairwise(bounds.tolist()):
        tiles = 0
        for first in range(start, end, 128):
            keys = np.arange(first, min(first + 128, end))
            for window in windows:
                rows = int(seen_by_rows(layout, keys, window).any(axis=1).sum())
                tiles += -(-rows // 128)
        expected.append(128**2 * tiles)
    assert price_chunks_in_tiles(layout, bounds, windows).tolist() == expected


def test_own_blocks_in_tiles():
    layout = BlockLayout([9] * 4, [0] * 4, [True, True, True, False], 16)
    assert price_own_blocks_in_tiles(layout, 2).tolist() == [2 * 128**2, 128**2]
    wide = BlockLayout([9] * 2, [0] * 2, [True, False], 129)
    assert price_own_blocks_in_tiles(wide, 1, (None, 3)).tolist() == [2 * 256**2]


def test_windows_are_exact_beyond_int32_and_float64():
    length, size = 2**34, 2**15 + 1
    anchors = np.sort(np.random.default_rng(5).integers(2**33, length, 40))
    layout = BlockLayout(anchors, np.zeros(40, int), np.ones(40, bool), size)
    bounds = np.array([0, 2**33 + 7, length - 3, length])
    window = 2**32 + 1
    expected = [
        sum(
            max(0, min(a, end) - max(0, a + t - window + 1, start))
            for a in anchors.tolist()
            for t in (0, size - 1)
        )
        for start, end in pairwise(bounds.tolist())
    ]
    ends = BlockLayout(anchors, np.zeros(40, int), np.ones(40, bool), 1)
    first_slots = price_chunks(ends, bounds, (window,))
    shorter = price_chunks(ends, bounds, (window - size + 1,))
    assert (first_slots + shorter).tolist() == expected
    total = price_chunks(layout, np.array([0, length]), (window, window))
    assert total.tolist() == [2 * 40 * sum(window - 1 - t for t in range(size))]
    assert total[0] > 2**53
