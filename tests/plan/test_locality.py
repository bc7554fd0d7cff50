"""Bundles to ranks: the fewest rows move, and loads stay."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.locality import match_ranks
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.strategies import equal_chunks


def moved(bounds, owner, source):
    """Rows that change their rank, one by one."""
    new = np.repeat(owner, np.diff(bounds))
    old = np.empty_like(new)
    for rank in range(source.cp_size):
        rows = source.rows(rank)
        old[rows[rows >= 0]] = rank
    return int((old != new).sum())


def random_source(rng, length, cp_size):
    """Any ranges on any ranks, some ranks empty, padding between them."""
    cuts = np.unique(rng.integers(0, length + 1, 8))
    cuts = np.unique(np.concatenate([[0], cuts, [length]]))
    owner = rng.integers(0, cp_size, cuts.size - 1)
    start, end = np.append(cuts[:-1], -3), np.append(cuts[1:], 0)
    owner = np.append(owner, rng.integers(0, cp_size))
    order = np.argsort(owner, kind="stable")
    return RowSource(start[order], end[order], owner[order], cp_size)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    cp_size=st.integers(1, 5),
    kinds=st.integers(1, 3),
    length=st.integers(1, 60),
)
def test_no_permutation_moves_fewer_rows(seed, cp_size, kinds, length):
    rng = np.random.default_rng(seed)
    bounds = np.sort(np.concatenate([[0], rng.integers(0, length + 1, 7), [length]]))
    owner = rng.integers(0, cp_size, bounds.size - 1)
    own_work = rng.integers(0, kinds, cp_size)
    source = random_source(rng, length, cp_size)
    matched = match_ranks(bounds, owner, own_work, source)
    allowed = [
        np.array(order)
        for order in permutations(range(cp_size))
        if (own_work[list(order)] == own_work).all()
    ]
    least = min(moved(bounds, order[owner], source) for order in allowed)
    assert moved(bounds, matched, source) == least <= moved(bounds, owner, source)
    assert any((order[owner] == matched).all() for order in allowed)
    np.testing.assert_array_equal(match_ranks(bounds, owner, own_work, source), matched)
    # What is best already stays as it is, whatever else is as good.
    np.testing.assert_array_equal(match_ranks(bounds, matched, own_work, source), matched)


def test_work_of_its_own_ties_a_bundle():
    """Ranks 0 and 1 should change places, but only 1 and 2 have equal work of their own."""
    bounds, owner = equal_chunks(30, 3), np.array([1, 0, 2])
    source = RowSource.contiguous(30, 3)
    assert match_ranks(bounds, owner, np.array([5, 5, 5]), source).tolist() == [0, 1, 2]
    assert match_ranks(bounds, owner, np.array([7, 5, 5]), source).tolist() == [1, 0, 2]


@pytest.mark.parametrize("cp_size", [4, 8])
def test_shuffled_ranks_are_found_again(cp_size):
    length = 16 * cp_size * 10
    for source in (
        RowSource.contiguous(length, cp_size),
        RowSource.zigzag(length, cp_size),
        RowSource.zigzag_documents([0, length // 2, length], cp_size),
    ):
        start = np.sort(source.start)
        order = np.argsort(source.start)
        bounds = np.append(start, length)
        shuffle = np.random.default_rng(0).permutation(cp_size)
        own_work = np.zeros(cp_size, dtype=np.int64)
        found = match_ranks(bounds, shuffle[source.owner[order]], own_work, source)
        assert moved(bounds, found, source) == 0


def test_many_ranks_and_rows():
    """64 M rows over 1024 ranks: pieces are intersected, no row is looked at."""
    cp_size, length = 1024, 2**26
    bounds = equal_chunks(length, cp_size * 32)
    owner = np.random.default_rng(0).permutation(np.repeat(np.arange(cp_size), 32))
    source = RowSource.zigzag(length, cp_size)
    matched = match_ranks(bounds, owner, np.zeros(cp_size, dtype=np.int64), source)
    assert (np.bincount(matched) == 32).all()

    def kept(owner):
        chunk_source = np.arange(2 * cp_size).repeat(16)
        return (owner == np.minimum(chunk_source, 2 * cp_size - 1 - chunk_source)).sum()

    assert kept(matched) > 2 * kept(owner)


def test_other_contexts_and_groups_are_refused():
    bounds, owner, own_work = equal_chunks(30, 3), np.arange(3), np.zeros(3, dtype=np.int64)
    for source in (RowSource.contiguous(33, 3), RowSource.contiguous(30, 2)):
        with pytest.raises(ConfigError, match="describe the source of this very context"):
            match_ranks(bounds, owner, own_work, source)
