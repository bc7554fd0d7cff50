"""The balanced-local strategy: few blocks a rank, nearly as even as balanced."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.documents import Documents
from megatron_splitkv.plan.local import (
    _assign,
    _attended,
    _cut,
    _level,
    local_chunks,
    most_attended,
)
from megatron_splitkv.plan.rank_groups import RankGroups
from megatron_splitkv.plan.redistribution import rows_moved
from megatron_splitkv.plan.row_source import RowSource
from tests.plan.layouts import (
    layout_of,
    papers_layout,
    random_layout,
    random_plan,
    shuffled,
    uneven_layout,
)


def local(layout, length, cp_size, chunks_per_rank=None, windows=(None,)):
    return build_plan(
        layout,
        length,
        cp_size,
        strategy="balanced-local",
        chunks_per_rank=chunks_per_rank,
        windows=windows,
    )


def late(length, anchors=1):
    """A document whose anchors all lie at its end: work is proportional to length x anchors."""
    return (length, list(range(length - anchors, length)), 0)


def ranks_of_documents(plan):
    """For each document, in order, the ranks that hold a row which one of its blocks sees."""
    starts = plan.layout.document_starts
    sees = np.array([np.less(*plan.key_ranges(rank)) for rank in range(plan.cp_size)])
    return [np.flatnonzero(sees[:, starts == s].any(axis=1)).tolist() for s in np.unique(starts)]


def attended(plan):
    """Part of all blocks that the busiest rank attends."""
    casts = [plan.query_cast(rank, "group").blocks.size for rank in range(plan.cp_size)]
    return max(casts) / plan.num_blocks


def most_rows(plan):
    """Rows of the rank that has most, in even shares."""
    rows = max(plan.num_rows(rank) for rank in range(plan.cp_size))
    return rows * plan.cp_size / plan.context_length


def assert_valid(plan, length):
    assert plan.context_length == length
    assert (np.diff(plan.chunk_bounds) >= 0).all()
    rows = np.concatenate([plan.rows(rank) for rank in range(plan.cp_size)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(length))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    cp_size=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16]),
    per_rank=st.integers(1, 6),
    windows=st.sampled_from([(None,), (None, 8, 8), (5,), (1,)]),
)
def test_every_row_once_and_bounds_kept(seed, cp_size, per_rank, windows):
    """Empty documents, documents without anchors, padding, tails, fewer documents than ranks."""
    layout, length = random_layout(seed, max_documents=12)
    per_rank = max(1, min(per_rank, length // cp_size))
    plan = local(layout, length, cp_size, per_rank, windows)
    balanced = build_plan(layout, length, cp_size, chunks_per_rank=per_rank, windows=windows)
    assert_valid(plan, length)
    assert plan.work.sum() == balanced.work.sum()
    assert plan.work.max() <= max(balanced.work.max(), 1.015 * plan.work.mean())
    rows = max(plan.num_rows(rank) for rank in range(cp_size))
    assert rows <= 1.5 * np.ceil(length / cp_size) + per_rank
    assert local(layout, length, cp_size, per_rank, windows).digest == plan.digest


def long_and_short():
    """A document of most rows, and many that have most blocks: no grouping needs as few queries."""
    rng = np.random.default_rng(0)
    documents = [(20_000, 64)] + [(120, 32)] * 80
    drawn = [(n, np.sort(rng.choice(n, count, False)).tolist(), 0) for n, count in documents]
    return layout_of(drawn, block_size=4)


@st.composite
def mixed_documents(draw):
    """Few long documents with few anchors and many short ones with many, or anything else."""
    seed = draw(st.integers(0, 2**20))
    if draw(st.booleans()):
        return random_layout(seed, max_documents=30)
    rng = np.random.default_rng(seed)
    documents = []
    for length, most in ((4000, 3), (40, 30)):
        for _ in range(rng.integers(0, most)):
            rows = int(rng.integers(1, length))
            inside = np.sort(rng.choice(rows, min(rows, int(rng.integers(1, 20))), False))
            documents.append((rows, inside.tolist(), int(rng.integers(0, 2))))
    order = rng.permutation(len(documents))
    return layout_of([documents[i] for i in order], block_size=int(rng.integers(1, 6)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(mixed_documents(), st.sampled_from([1, 2, 3, 5, 8, 16]), st.sampled_from([(None,), (9,)]))
@example(long_and_short(), 2, (None,))
@example(long_and_short(), 8, (None,))
@example(long_and_short(), 16, (None,))
def test_never_more_queries_than_balanced(batch, cp_size, windows):
    """In the busiest rank's blocks and hence in those that travel to it."""
    layout, length = batch
    plan = local(layout, length, cp_size, windows=windows)
    balanced = build_plan(layout, length, cp_size, windows=windows)
    if plan.num_blocks:
        assert attended(plan) <= attended(balanced)
    if plan.digest != balanced.digest:
        assert attended(plan) < attended(balanced)  # or it would have no reason to be less even


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**20), st.integers(1, 9))
def test_need_by_first_rows_equals_need_by_definition(seed, cp_size):
    """Of random cuts and owners too: empty chunks, ranks without rows, blocks in any order."""
    for plan in (random_plan(seed, cp_size), shuffled(random_plan(seed, cp_size), seed)):
        found = most_attended(
            plan.layout, Documents.of(plan.layout), plan.chunk_bounds, plan.chunk_owner, cp_size
        )
        needs = plan.needs()
        own = np.arange(plan.num_blocks) * cp_size // max(1, plan.num_blocks)
        needs[own, np.arange(plan.num_blocks)] = True
        assert found == needs.sum(axis=1).max()


def test_random_layouts_are_often_grouped():
    """Or the test above would show nothing."""
    grouped = 0
    for seed in range(60):
        layout, length = random_layout(seed, max_documents=12)
        if length >= 16:
            other = build_plan(layout, length, 4, chunks_per_rank=4)
            grouped += local(layout, length, 4, 4).digest != other.digest
    assert grouped > 30


@pytest.mark.parametrize("cp_size", [8, 16, 32])
def test_four_documents_need_less_than_a_third(cp_size):
    """The paper's workload in full: 4 x 256k, 512 anchors each, whose works differ by 2 %."""
    imbalance = []
    for seed in range(20):
        layout, length = papers_layout(seed)
        plan = local(layout, length, cp_size)
        assert attended(plan) <= 0.30
        assert plan.imbalance <= 0.015
        assert most_rows(plan) <= 1.12
        imbalance.append(plan.imbalance)
    assert np.mean(imbalance) < 0.007


@pytest.mark.parametrize("cp_size", [8, 16, 32])
def test_eight_documents_need_less_than_a_quarter(cp_size):
    for seed in range(20):
        layout, length = papers_layout(seed, documents=8)
        plan = local(layout, length, cp_size)
        assert attended(plan) <= 0.22
        assert plan.imbalance <= 0.015
        assert most_rows(plan) <= 1.27


@pytest.mark.parametrize("cp_size", [8, 32])
def test_uneven_documents(cp_size):
    """Twelve of log-normal lengths: the longest alone has up to two thirds of all blocks."""
    share = []
    for seed in range(20):
        layout, length = uneven_layout(seed)
        plan = local(layout, length, cp_size)
        assert plan.imbalance <= 0.015
        assert most_rows(plan) <= 1.5 + 1e-3
        share.append(attended(plan) / attended(build_plan(layout, length, cp_size)))
    assert max(share) <= 1
    assert np.mean(share) < 0.65


def test_a_tail_goes_where_work_is_missing():
    """Anchors of the first document lie later: of its rows the last go to the other rank."""
    layout, length = layout_of(
        [(400, list(range(210, 400)), 0), (400, list(range(180, 370)), 0)], block_size=2
    )
    plan = local(layout, length, 2, 8)
    assert plan.imbalance < 0.015
    start = plan.layout.document_starts
    first, second = plan.needs()
    assert first[start == 0].all()
    assert second[start == 400].all()
    few = second[start == 0]
    assert 0 < few.sum() < 95
    assert few[-few.sum() :].all()  # those with the last anchors


def test_windows_are_priced():
    """Three layers of four see 64 rows: the sum is as even as that of full attention."""
    for seed in range(5):
        layout, length = papers_layout(seed, length=2**14)
        plan = local(layout, length, 8, windows=(None, 64, 64, 64))
        assert plan.windows == (None, 64, 64, 64)
        assert plan.imbalance <= 0.015
        assert attended(plan) <= 0.31


def test_windows_decide_what_documents_cost():
    """Two documents with as many anchors: equal under a window, 2 to 1 under full attention."""
    layout, length = layout_of(
        [(6000, list(range(1500, 6000, 90)), 0), (3000, list(range(750, 3000, 45)), 0)],
        block_size=4,
    )
    assert attended(local(layout, length, 2, 8, windows=(40,))) < 0.6
    assert attended(local(layout, length, 3, 8)) < 0.7


@pytest.mark.parametrize("make", [RowSource.zigzag, RowSource.contiguous])
def test_rows_that_are_there_already_do_not_cost_locality(make):
    """Bundles change places within their groups: as many queries, no more work, fewer rows."""
    fewer = 0
    for seed in range(5):
        layout, length = papers_layout(seed, length=2**16)
        source = make(length, 16)
        balanced = build_plan(layout, length, 16, chunks_per_rank=16)
        at_will, matched = (
            ContextPlan(layout, *local_chunks(balanced, 16, source=where), 16, "local")
            for where in (None, source)
        )
        assert attended(matched) <= 0.31
        np.testing.assert_array_equal(np.sort(matched.work), np.sort(at_will.work))
        needs = [
            plan.needs().reshape(4, 4, -1).any(axis=1) for plan in (at_will, matched)
        ]  # by group
        np.testing.assert_array_equal(*needs)
        assert rows_moved(matched, source) <= rows_moved(at_will, source)
        fewer += rows_moved(matched, source) < rows_moved(at_will, source)
    assert fewer >= 3


def test_blocks_that_a_rank_owns_count_as_attended():
    """Three blocks a rank; documents of four and two, each on the rank that owns the other's."""
    layout, _ = layout_of([(50, [10, 20, 30, 40], 0), (50, [10, 20], 0)], block_size=2)
    documents = Documents.of(layout)
    home = RankGroups(np.array([0, 1]), np.array([1, 1]))
    assert _attended(documents, home, documents.blocks) == 4
    away = RankGroups(np.array([1, 0]), np.array([1, 1]))
    assert _attended(documents, away, documents.blocks[::-1]) == 6


@pytest.mark.parametrize("seed", range(6))
def test_blocks_in_any_order(seed):
    layout, length = papers_layout(seed, length=300, anchors=40)
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


@pytest.mark.parametrize("cp_size", [1, 2, 5, 8])
def test_one_document_is_balanced(cp_size):
    layout, length = papers_layout(0, documents=1)
    plan, balanced = local(layout, length, cp_size), build_plan(layout, length, cp_size)
    assert plan.digest == balanced.digest
    assert plan.strategy == "balanced-local"


def test_as_many_groups_as_balance_allows():
    """Of eight ranks: pairs for [1, 1, 1, 1]; 4, 2 and 2 for [2, 1, 1]; all for [2, 1], which has
    no tail that few blocks see."""
    for lengths, ranks in (
        ([256] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([512, 256, 256], [[0, 1, 2, 3], [4, 5], [6, 7]]),
        ([512, 256], [list(range(8))] * 2),
    ):
        layout, length = layout_of([late(n) for n in lengths], block_size=2)
        assert ranks_of_documents(local(layout, length, 8, 8)) == ranks


def test_documents_that_do_not_divide_among_the_ranks():
    """Five documents alike: on 5 ranks a rank each, on 6 a rank holds parts of three at most."""
    layout, length = layout_of([late(210)] * 5, block_size=2)
    assert local(layout, length, 5, 4).imbalance == 0.0
    assert ranks_of_documents(local(layout, length, 5, 4)) == [[0], [1], [2], [3], [4]]
    six = local(layout, length, 6, 6)
    assert six.imbalance <= 0.015
    assert six.needs().sum(axis=1).max() <= 3


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


def test_ranks_of_a_group_have_equally_many_rows():
    """J chunks each, and few cuts beside them: where a piece of a group's rows ends."""
    layout, length = papers_layout(3, length=2**16)
    plan = local(layout, length, 8, 6)
    rows = np.array([plan.num_rows(rank) for rank in range(8)]).reshape(4, 2)
    assert (abs(rows[:, 0] - rows[:, 1]) <= 6).all()
    assert 8 * 6 <= plan.chunk_owner.size <= 8 * 6 + 8 * 4


@settings(max_examples=60, deadline=None)
@given(
    size=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    per_rank=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_every_rank_gets_j_chunks_of_its_group(size, per_rank, seed):
    rng = np.random.default_rng(seed)
    size = np.array(size)
    work, own = rng.integers(0, 50, size.sum() * per_rank), rng.integers(0, 9, size.sum())
    rank, load = _assign(work, own, size, per_rank)
    assert (np.bincount(rank, minlength=size.sum()) == per_rank).all()
    group = np.repeat(np.arange(size.size), size)
    np.testing.assert_array_equal(group[rank], np.repeat(group, per_rank))
    np.testing.assert_array_equal(load, own + np.bincount(rank, work, size.sum()))


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
    layout, length = papers_layout(1, length=400, anchors=20)
    plan = local(layout, length, 4)
    again = ContextPlan.from_arrays(plan.to_arrays())
    assert (again.digest, again.strategy) == (plan.digest, "balanced-local")


@pytest.mark.parametrize("seed", range(30))
def test_level_equals_pouring_row_by_row(seed):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 7))
    rows, size = rng.integers(0, 20, groups), rng.integers(1, 4, groups)
    extra = int(rng.integers(0, 60))
    poured = _level(rows, size, extra)
    assert (poured >= 0).all()
    assert poured.sum() == extra
    heights = rows.astype(float)
    for _ in range(extra):
        heights[np.argmin(heights / size)] += 1
    assert (abs(rows + poured - heights) <= 1 + size).all()
    if (size == 1).all():
        assert sorted((rows + poured).tolist()) == sorted(heights.tolist())


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
