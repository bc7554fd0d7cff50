"""The balanced-local strategy: documents within groups of ranks, nearly as even as balanced."""

import numpy as np
import pytest

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.local import _cut, _level
from tests.plan.layouts import layout_of, random_layout


def local(layout, length, cp_size, chunks_per_rank=None):
    return build_plan(
        layout, length, cp_size, strategy="balanced-local", chunks_per_rank=chunks_per_rank
    )


def late(length, anchors=1):
    """A document whose anchors all lie at its end: work is proportional to length x anchors."""
    return (length, list(range(length - anchors, length)), 0)


def ranks_of_documents(plan):
    """For each document, in order, the ranks that hold a row which one of its blocks sees."""
    starts = plan.layout.document_starts
    sees = np.array([np.less(*plan.key_ranges(rank)) for rank in range(plan.cp_size)])
    return [np.flatnonzero(sees[:, starts == s].any(axis=1)).tolist() for s in np.unique(starts)]


def assert_valid(plan, length):
    assert plan.context_length == length
    assert (np.diff(plan.chunk_bounds) >= 0).all()
    rows = np.concatenate([plan.rows(rank) for rank in range(plan.cp_size)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(length))


def papers_workload(seed, documents=4, length=2**16, anchors=512):
    """Prompts of a quarter, anchors uniform behind them."""
    rng = np.random.default_rng(seed)
    supervised = np.arange(length // 4, length)
    drawn = [np.sort(rng.choice(supervised, anchors, False)) for _ in range(documents)]
    return layout_of([(length, inside.tolist(), 0) for inside in drawn], block_size=16)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 6, 7, 8, 16])
def test_every_row_once_and_bounds_kept(cp_size):
    """Empty documents, documents without anchors, padding, tails, fewer documents than ranks."""
    for seed in range(60):
        layout, length = random_layout(seed, max_documents=12)
        per_rank = 1 + seed % 5
        plan = local(layout, length, cp_size, per_rank)
        balanced = build_plan(layout, length, cp_size, chunks_per_rank=per_rank)
        assert_valid(plan, length)
        assert plan.work.sum() == balanced.work.sum()
        assert plan.work.max() <= 1.05 * balanced.work.max()
        most_rows = max(plan.num_rows(rank) for rank in range(cp_size))
        assert most_rows <= 1.5 * np.ceil(length / cp_size) + per_rank
        assert local(layout, length, cp_size, per_rank).digest == plan.digest


def test_random_layouts_are_often_grouped():
    """Or the test above would show nothing."""
    grouped = 0
    for seed in range(60):
        layout, length = random_layout(seed, max_documents=12)
        other = build_plan(layout, length, 4, chunks_per_rank=4)
        grouped += local(layout, length, 4, 4).digest != other.digest
    assert grouped > 20


@pytest.mark.parametrize("seed", range(6))
def test_blocks_in_any_order(seed):
    layout, length = papers_workload(seed, length=300, anchors=40)
    order = np.random.default_rng(seed).permutation(layout.num_blocks)
    mixed = BlockLayout(
        layout.anchor_positions[order],
        layout.document_starts[order],
        layout.block_keep_mask[order],
        layout.block_size,
    )
    plan, sorted_plan = local(mixed, length, 4, 8), local(layout, length, 4, 8)
    assert_valid(plan, length)
    np.testing.assert_array_equal(plan.chunk_bounds, sorted_plan.chunk_bounds)
    np.testing.assert_array_equal(plan.chunk_owner, sorted_plan.chunk_owner)


@pytest.mark.parametrize("seed", range(5))
def test_papers_workload_needs_a_quarter(seed):
    layout, length = papers_workload(seed)
    plan = local(layout, length, 8)
    assert ranks_of_documents(plan) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.imbalance < 0.05
    needs = plan.needs()
    assert needs.sum() <= needs.size / 4
    # A block travels to the other rank of its owner's pair at most: 1 of 7.
    blocks = np.arange(layout.num_blocks)
    pair = blocks // (layout.num_blocks // 4)
    needs[2 * pair, blocks] = needs[2 * pair + 1, blocks] = False
    assert not needs.any()


def test_a_document_a_rank_needs_no_travel():
    layout, length = papers_workload(0, documents=8)
    plan = local(layout, length, 8)
    assert ranks_of_documents(plan) == [[rank] for rank in range(8)]


@pytest.mark.parametrize("cp_size", [1, 2, 5, 8])
def test_one_document_is_balanced(cp_size):
    layout, length = papers_workload(0, documents=1)
    plan, balanced = local(layout, length, cp_size), build_plan(layout, length, cp_size)
    assert plan.digest == balanced.digest
    assert plan.strategy == "balanced-local"


def test_as_many_groups_as_balance_allows():
    """Of eight ranks: four groups for [1, 1, 1, 1], two for [2, 1, 1], one for [2, 1]."""
    for lengths, ranks in (
        ([256] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([512, 256, 256], [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]),
        ([512, 256], [list(range(8))] * 2),
    ):
        layout, length = layout_of([late(n) for n in lengths], block_size=2)
        assert ranks_of_documents(local(layout, length, 8, 8)) == ranks


def test_groups_divide_the_ranks():
    """Five documents alike: on 6 ranks no equal groups, on 5 ranks a rank each."""
    layout, length = layout_of([late(210)] * 5, block_size=2)
    assert local(layout, length, 5, 4).imbalance == 0.0
    assert ranks_of_documents(local(layout, length, 5, 4)) == [[0], [1], [2], [3], [4]]
    six = local(layout, length, 6, 6)
    assert six.digest == build_plan(layout, length, 6, chunks_per_rank=6).digest


def test_out_of_layout_order_only_where_it_must():
    """[1, 5, 4] falls into halves as {1, 4} and {5} alone; their order is that of documents."""
    layout, length = layout_of([late(n) for n in (100, 500, 400)], block_size=2)
    assert ranks_of_documents(local(layout, length, 2, 4)) == [[0], [1], [0]]
    layout, length = layout_of([late(n) for n in (100, 800, 900, 1000, 200)], block_size=2)
    assert ranks_of_documents(local(layout, length, 3, 4)) == [[0], [1], [0], [2], [1]]
    layout, length = layout_of([late(n) for n in (990, 990, 1010, 1010)], block_size=2)
    assert ranks_of_documents(local(layout, length, 2, 4)) == [[0], [0], [1], [1]]


def test_equal_work_of_unequal_length_costs_memory_up_to_a_bound():
    """Rows 600 and 300 are 1.33 times an even share, 1000 and 100 would be 1.82 times."""
    bearable, length = layout_of([late(600, 5), late(300, 10)], block_size=2)
    assert ranks_of_documents(local(bearable, length, 2, 8)) == [[0], [1]]
    lopsided, length = layout_of([late(1000, 5), late(104, 50)], block_size=2)
    plan = local(lopsided, length, 2, 8)
    assert plan.digest == build_plan(lopsided, length, 2, chunks_per_rank=8).digest


def test_rows_that_nothing_sees_even_out_memory():
    """A document without anchors in front, one between, and a tail."""
    layout, length = layout_of(
        [(90, [], 1), late(400, 5), (40, [], 2), late(200, 10)], block_size=2
    )
    plan = local(layout, length + 70, 2, 8)
    assert ranks_of_documents(plan) == [[], [0], [], [1]]
    assert [plan.num_rows(rank) for rank in range(2)] == [400, 400]


def test_chunks_of_a_group_are_equally_long():
    layout, length = papers_workload(3)
    plan = local(layout, length, 8, 6)
    rows = np.array([plan.num_rows(rank) for rank in range(8)])
    assert abs(rows - length / 8).max() <= 6
    # Six chunks a rank; beyond them only the cuts where a document's seen rows end.
    assert 8 * 6 <= plan.chunk_owner.size <= 8 * 6 + 2 * 4


def test_own_blocks_count():
    """Of each pair of ranks the first owns the kept blocks: it gets less of the context."""
    layout, length = layout_of([(60, [30, 40], 2), (60, [30, 40], 2)], block_size=10)
    plan = local(layout, length, 4, 6)
    assert ranks_of_documents(plan) == [[0, 1], [2, 3]]
    assert (plan.work - plan.context_work).tolist() == [200, 0, 200, 0]
    assert (plan.context_work[::2] < plan.context_work[1::2]).all()


def test_anchors_of_padding_blocks_mean_nothing():
    layout, length = layout_of([(300, [100, 150], 2), (300, [100, 150], 2)], block_size=2)
    padding_ends = np.where(
        layout.block_keep_mask, layout.anchor_positions, layout.document_starts + 299
    )
    moved = BlockLayout(padding_ends, layout.document_starts, layout.block_keep_mask, 2)
    plan, other = local(layout, length, 2, 4), local(moved, length, 2, 4)
    np.testing.assert_array_equal(plan.chunk_bounds, other.chunk_bounds)
    np.testing.assert_array_equal(plan.chunk_owner, other.chunk_owner)


def test_survives_collation():
    layout, length = papers_workload(1, length=400, anchors=20)
    plan = local(layout, length, 4)
    again = ContextPlan.from_arrays(plan.to_arrays())
    assert (again.digest, again.strategy) == (plan.digest, "balanced-local")


@pytest.mark.parametrize("seed", range(30))
def test_level_equals_pouring_row_by_row(seed):
    rng = np.random.default_rng(seed)
    rows, extra = rng.integers(0, 20, rng.integers(1, 7)), int(rng.integers(0, 60))
    poured = _level(rows, extra)
    heights = rows.tolist()
    for _ in range(extra):
        heights[heights.index(min(heights))] += 1
    assert (poured >= 0).all()
    assert sorted((rows + poured).tolist()) == sorted(heights)


@pytest.mark.parametrize("seed", range(30))
def test_cut_equals_row_by_row(seed):
    rng = np.random.default_rng(seed)
    length = rng.integers(0, 6, rng.integers(1, 6))
    start = np.cumsum(length + 3)[::-1].copy()
    cuts = np.sort(np.concatenate([[0, length.sum()], rng.integers(0, length.sum() + 1, 4)]))
    pieces = _cut(start, length, cuts)
    rows = [row for s, n in zip(start, length, strict=True) for row in range(s, s + n)]
    found = [(row, i) for s, n, i in zip(*pieces, strict=True) for row in range(s, s + n)]
    between = np.searchsorted(cuts, np.arange(len(rows)), side="right") - 1
    assert found == list(zip(rows, between.tolist(), strict=True))
