import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.pricing import cumulative_context_work, price_chunks
from tests.plan.layouts import fig5_layout, random_layout, visible


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
