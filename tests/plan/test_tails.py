"""Tails that change hands: what groups have afterwards is what a count of every row says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan.documents import Documents
from megatron_splitkv.plan.rank_groups import possible_groups
from megatron_splitkv.plan.tails import TakingLimits, even_pieces
from tests.plan.layouts import layout_of, papers_layout, random_layout, visible

NO_LIMITS = TakingLimits(rows=2**40, blocks=2**40)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    cp_size=st.integers(2, 12),
    rows=st.integers(0, 80),
    blocks=st.integers(0, 60),
    own=st.integers(0, 40),
)
def test_pieces_by_definition(seed, cp_size, rows, blocks, own):
    layout, length = random_layout(seed, max_documents=10)
    documents = Documents.of(layout)
    if not documents.work.any():
        return
    own_work = np.random.default_rng(seed).integers(0, own + 1, cp_size)
    seen = visible(layout, np.arange(length))
    price = layout.block_size * seen.sum(axis=0)
    limits = TakingLimits(rows, blocks)
    for groups in possible_groups(documents.work, cp_size):
        pieces = even_pieces(documents, groups, own_work, length, limits)
        group_of_row = np.full(length, -1)
        for start, end, group in zip(pieces.start, pieces.end, pieces.group, strict=True):
            assert (group_of_row[start:end] == -1).all()
            group_of_row[start:end] = group
        np.testing.assert_array_equal(group_of_row >= 0, price > 0)
        own_of_group = np.add.reduceat(own_work, groups.first_rank)
        rows_before = groups.sums(documents.end - documents.start)
        blocks_before = groups.sums(documents.blocks)
        for group in range(groups.size.size):
            mine = group_of_row == group
            assert pieces.rows[group] == mine.sum()
            assert pieces.work[group] == price[mine].sum() + own_of_group[group]
            # Blocks of a document whose rows were all given away are counted still.
            assert pieces.blocks[group] >= seen[:, mine].any(axis=1).sum()
            most_rows = max(rows, length / cp_size) * groups.size[group]
            assert pieces.rows[group] <= max(most_rows, rows_before[group])
            assert pieces.blocks[group] <= max(blocks, blocks_before[group])


@pytest.mark.parametrize("seed", range(10))
def test_work_is_even_without_limits(seed):
    """To a thousandth of a rank, though single documents have up to 3 % too much."""
    layout, length = papers_layout(seed, length=2**16)
    documents = Documents.of(layout)
    groups = possible_groups(documents.work, 8)[0]
    assert groups.size.tolist() == [2, 2, 2, 2]
    pieces = even_pieces(documents, groups, np.zeros(8, dtype=np.int64), length, NO_LIMITS)
    mean = documents.work.sum() / 4
    assert documents.work.max() > 1.004 * mean
    assert pieces.work.max() <= 1.0006 * mean
    assert (pieces.blocks >= 512).all()
    assert pieces.blocks.max() < 512 + 300
    assert pieces.rows.max() < 1.2 * length / 4


def test_limits_hold_tails_back():
    layout, length = papers_layout(0)
    documents = Documents.of(layout)
    groups = possible_groups(documents.work, 8)[0]
    own = np.zeros(8, dtype=np.int64)
    free = even_pieces(documents, groups, own, length, NO_LIMITS)
    few_blocks = even_pieces(documents, groups, own, length, TakingLimits(2**40, 512 + 30))
    assert few_blocks.blocks.max() <= 512 + 30 < free.blocks.max()
    few_rows = even_pieces(documents, groups, own, length, TakingLimits(length // 8 + 2000, 2**40))
    assert few_rows.rows.max() <= length // 4 + 4000 < free.rows.max()
    for held in (few_blocks, few_rows):
        assert free.work.max() < held.work.max() <= documents.work.max()


def test_rows_are_evened_where_work_is():
    """One document has few anchors and many rows: the other group takes some, and gives work."""
    long = (6000, list(range(1500, 6000, 10)), 0)
    short = (2000, list(range(200, 2000, 1)), 0)
    layout, length = layout_of([long, short], block_size=2)
    documents = Documents.of(layout)
    groups = possible_groups(documents.work, 8)[0]
    pieces = even_pieces(documents, groups, np.zeros(8, dtype=np.int64), length, NO_LIMITS)
    share = length * groups.size / 8
    before = groups.sums(documents.end - documents.start) / share
    assert before.max() > 1.15
    assert (pieces.rows / share).max() < 1.11
    assert (pieces.work / groups.size).max() <= 1.001 * pieces.work.sum() / 8
