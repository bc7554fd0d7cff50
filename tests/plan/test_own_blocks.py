import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.own_blocks import own_block_staircase
from tests.plan.coverage import cells, columns, count_coverage

KEEP = np.array([True, False, False, True, True])


def seen(keep, size, window):
    """The definition: one comparison per pair of rows."""
    rows = range(keep.size * size)
    return np.array(
        [
            [
                bool(keep[q // size])
                and q // size == k // size
                and (window is None or (k <= q and q - k < window))
                for k in rows
            ]
            for q in rows
        ]
    )


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_visible_pair_exactly_once(size, window):
    staircase = own_block_staircase(KEEP, size, window)
    expected = seen(KEEP, size, window)
    np.testing.assert_array_equal(count_coverage(staircase, expected.shape[1]), expected)
    key = np.arange(expected.shape[1])
    by_row = (staircase.row_start[:, None] <= key) & (key < staircase.row_end[:, None])
    np.testing.assert_array_equal(by_row, expected)
    executed = size * sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in cells(staircase))
    assert staircase.needed_pairs == expected.sum()
    assert staircase.executed_pairs == executed == KEEP.sum() * size**2


def test_full_layers_are_dense_and_windows_are_leaves():
    squares = [[0, 1, 0, 4], [3, 4, 12, 16], [4, 5, 16, 20]]
    full, causal = own_block_staircase(KEEP, 4), own_block_staircase(KEEP, 4, 100)
    assert [columns(level) for level in full.levels] == [squares]
    assert len(full.leaves) == 0
    assert causal.levels == []
    assert columns(causal.leaves) == squares


def test_of_a_plan():
    layout = BlockLayout([3, 0, 9, 5], [0, 0, 8, 0], [True, False, True, True], 2)
    plan = build_plan(layout, 12, 2)
    assert plan.own_staircase(0).needed_pairs == 4
    assert plan.own_staircase(0, 2).needed_pairs == 3
    assert plan.own_staircase(1, 1).needed_pairs == 4
    assert plan.own_staircase(1, 1) is plan.own_staircase(1, 1)
    with pytest.raises(ConfigError, match="window 0 must be at least 1"):
        plan.own_staircase(0, 0)
