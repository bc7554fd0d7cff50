import numpy as np
import pytest

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import LeafLimits, build_plan, build_staircase
from tests.plan.coverage import assert_disjoint_and_ascending, cells, columns, count_coverage
from tests.plan.layouts import fig5_layout, layout_of, random_plan, shuffled, visible

NO_LEAVES = LeafLimits(rows=0, keys=0, pairs=0)
LIMITS = [
    NO_LEAVES,
    LeafLimits(rows=8, keys=3, pairs=0),
    LeafLimits(rows=12, keys=1000, pairs=10),
    LeafLimits(),
]


def assert_exact(plan, rank, limits, *, ordered=True):
    staircase = plan.staircase(rank, limits)
    seen = visible(plan.layout, plan.rows(rank))
    by_row = seen.repeat(plan.block_size, axis=0)
    np.testing.assert_array_equal(count_coverage(staircase, plan.num_rows(rank)), by_row)
    for level in staircase.levels:
        assert len(level)
        assert_disjoint_and_ascending(level)
    leaves = staircase.leaves
    assert_disjoint_and_ascending(leaves, keys=ordered)
    for q0, q1, k0, k1 in columns(leaves):
        rows = slice(q0 * staircase.block_size, q1 * staircase.block_size)
        assert (staircase.row_end[rows] > k0).all()  # every row of a leaf sees something
        assert staircase.row_end[rows][-1] == k1

    size = plan.layout.block_size
    executed = size * sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in cells(staircase))
    assert staircase.needed_pairs == size * seen.sum() == plan.context_work[rank]
    assert staircase.executed_pairs == executed >= staircase.needed_pairs
    if limits == NO_LEAVES:
        assert len(leaves) == 0
        assert staircase.executed_pairs == staircase.needed_pairs
    return staircase


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_every_visible_pair_exactly_once(cp_size, limits):
    """Random documents, cuts and owners: empty shards, padding blocks, odd P, no anchors."""
    for seed in range(25):
        plan = random_plan(seed, cp_size)
        for rank in range(cp_size):
            assert_exact(plan, rank, limits)


@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt"])
@pytest.mark.parametrize("limits", LIMITS)
def test_many_anchors_over_long_documents(strategy, limits):
    rng = np.random.default_rng(5)
    documents = [
        (n, np.sort(rng.choice(n, n // 7, replace=False)).tolist(), 3) for n in (701, 1, 300, 513)
    ]
    layout, length = layout_of(documents, block_size=16)
    plan = build_plan(layout, length, 5, strategy=strategy, chunks_per_rank=4)
    for rank in range(5):
        assert_exact(plan, rank, limits)


@pytest.mark.parametrize("limits", LIMITS)
def test_overlapping_neighbours_and_equal_anchors(limits):
    layout = BlockLayout([3, 4, 4, 5, 5, 5, 6, 40], [0] * 8, [True] * 8, 8)
    plan = build_plan(layout, 48, 2, strategy="none")
    assert_exact(plan, 0, limits)
    assert_exact(plan, 1, limits)


@pytest.mark.parametrize("limits", LIMITS)
def test_blocks_in_any_order(limits):
    """Hand-made layouts: padding amid a document, unsorted anchors, interleaved documents."""
    for seed in range(25):
        mixed = shuffled(random_plan(seed, 2), seed)
        for rank in range(2):
            assert_exact(mixed, rank, limits, ordered=False)


def test_padding_at_the_end_of_each_document_costs_no_level():
    inside = list(range(10, 74))
    dense, length = layout_of([(80, inside, 0), (80, inside, 0)], block_size=4)
    padded, _ = layout_of([(80, inside, 7), (80, inside, 7)], block_size=4)
    levels = [len(build_plan(x, length, 1).staircase(0, NO_LEAVES).levels) for x in (dense, padded)]
    assert levels[0] == levels[1] <= 2 + np.log2(64)


def test_shape_of_a_small_staircase():
    """Four blocks: the shared prefix, then the upper half up to the middle, then the corners."""
    staircase = build_staircase(np.zeros(4, int), np.array([2, 5, 7, 9]), 1, NO_LEAVES)
    assert [columns(level) for level in staircase.levels] == [
        [[0, 4, 0, 2]],
        [[2, 4, 2, 7]],
        [[1, 2, 2, 5], [3, 4, 7, 9]],
    ]


def test_leaf_limits():
    key_start, key_end = np.zeros(4, int), np.array([2, 5, 7, 9])
    whole = build_staircase(key_start, key_end, 1, LeafLimits(rows=3, keys=7, pairs=0))
    assert columns(whole.leaves) == [[1, 4, 2, 9]]
    assert (whole.needed_pairs, whole.executed_pairs) == (23, 4 * 2 + 3 * 7)
    for limits in (
        LeafLimits(rows=2, keys=7, pairs=0),
        LeafLimits(rows=3, keys=6, pairs=0),
        LeafLimits(rows=0, keys=0, pairs=20),
    ):
        assert len(build_staircase(key_start, key_end, 1, limits).levels) > 1
    by_pairs = build_staircase(key_start, key_end, 1, LeafLimits(rows=0, keys=0, pairs=21))
    assert columns(by_pairs.leaves) == columns(whole.leaves)


def test_waste_is_small_on_the_papers_workload():
    rng = np.random.default_rng(1)
    length = 2**18
    documents = [
        (length, np.sort(rng.choice(np.arange(length // 4, length), 512, False)).tolist(), 0)
        for _ in range(4)
    ]
    layout, total = layout_of(documents, block_size=16)
    for cp_size in (1, 8, 64):
        staircase = build_plan(layout, total, cp_size, strategy="lpt").staircase(0)
        assert staircase.executed_pairs < 1.01 * staircase.needed_pairs
        assert len(staircase.levels) <= 11


def test_a_rank_without_visible_keys_has_no_rectangle():
    """A2's layout: one anchor at 10, four ranks of 16 contiguous rows."""
    layout = BlockLayout([10], [0], [True], 4)
    plan = build_plan(layout, 64, 4, strategy="none", chunks_per_rank=1)
    assert [columns(level) for level in plan.staircase(0).levels] == [[[0, 1, 0, 10]]]
    for rank in (1, 2, 3):
        staircase = plan.staircase(rank)
        assert staircase.levels == []
        assert len(staircase.leaves) == 0
        assert staircase.needed_pairs == staircase.executed_pairs == 0


def test_built_once_per_rank_and_limits():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4)
    assert plan.staircase(1) is plan.staircase(1)
    assert plan.staircase(1) is not plan.staircase(2)
    assert plan.staircase(1) is not plan.staircase(1, NO_LEAVES)
