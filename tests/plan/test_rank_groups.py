"""Documents to groups of ranks: whole ranks, every document once, loads that can be evened out."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan.rank_groups import RankGroups, possible_groups


def ways(work, cp_size):
    found = possible_groups(np.array(work, dtype=np.int64), cp_size)
    return [(way.group_of.tolist(), way.size.tolist()) for way in found]


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any),
    cp_size=st.integers(1, 24),
)
def test_every_way_is_a_partition(work, cp_size):
    found = ways(work, cp_size)
    assert len({str(way) for way in found}) == len(found)
    for group_of, size in found:
        assert len(group_of) == len(work)
        assert sum(size) == cp_size
        assert min(size) >= 1
        assert sorted(set(group_of)) == list(range(len(size)))
        assert len(size) > 1
    assert ways(work, cp_size) == found


def test_in_order_where_the_cut_is_near():
    """Shares of 8 ranks: 2.01, 0.99, 3, 2; then 2.7 and 5.3, cut only where anything goes."""
    assert ([0, 1, 2, 3], [2, 1, 3, 2]) in ways([201, 99, 300, 200], 8)
    assert ways([270, 530], 8)[0] == ([0, 1], [3, 5])


def test_of_several_near_ends_the_nearest_is_cut():
    assert ways([96, 4, 100], 2)[0] == ([0, 0, 1], [1, 1])


def test_small_documents_fill_the_last_rank_of_large_ones():
    """2.5, 0.3, 1.6, 0.5, 0.4, 0.7 ranks of 6: {2.5, 0.5}, {1.6, 0.4}, {0.3, 0.7}."""
    assert ([0, 1, 2, 0, 2, 1], [3, 1, 2]) in ways([250, 30, 160, 50, 40, 70], 6)


def test_documents_just_above_the_tolerance():
    """99 alike on 202 ranks: 2 ranks are near enough, though less than a document fills."""
    assert (list(range(99)), [2] * 98 + [6]) in ways([1] * 99, 202)


def test_equal_groups_by_lpt_in_the_order_of_documents():
    assert ([0, 1, 0], [1, 1]) in ways([100, 500, 400], 2)
    assert ([0, 1, 0, 2, 1], [1, 1, 1]) in ways([100, 800, 900, 1000, 200], 3)


def test_sums_and_ranks():
    groups = RankGroups(np.array([0, 1, 0]), np.array([3, 1]))
    assert groups.sums(np.array([1, 10, 100])).tolist() == [101, 10]
    assert groups.first_rank.tolist() == [0, 3]
    assert groups.of_rank.tolist() == [0, 0, 0, 1]
