"""Work in kernel tiles, and staircases cut at tiles."""

import numpy as np
import pytest

from megatron_splitkv.attention.kernels.thd import TILE_LEAF_LIMITS
from megatron_splitkv.plan import LeafLimits, Rectangles, Staircase, build_plan, build_staircase
from megatron_splitkv.plan.tiles import TileWork, tile_imbalance, tile_work, tiles_of_ranks
from tests.plan.layouts import layout_of, papers_layout, uneven_layout

NO_LEAVES = LeafLimits(rows=0, keys=0, pairs=0)
BLOCK_SIZE = 16


def paper_plan(cp_size, strategy, *, samples=4, chunks_per_rank=None, length=2**18, seed=1):
    """512 anchors a sample in the last three quarters (prompt : response = 1 : 3), B = 16."""
    rng = np.random.default_rng(seed)
    responses = np.arange(length // 4, length)
    documents = [
        (length, np.sort(rng.choice(responses, 512, False)).tolist(), 0) for _ in range(samples)
    ]
    layout, total = layout_of(documents, block_size=BLOCK_SIZE)
    return build_plan(layout, total, cp_size, strategy=strategy, chunks_per_rank=chunks_per_rank)


def work_of(plan, limits, *, own=False):
    """Of every eighth rank or so."""
    ranks = range(0, plan.cp_size, max(1, plan.cp_size // 8))
    staircases = [[plan.staircase(rank, limits)] for rank in ranks]
    if own:
        for rank, of_rank in zip(ranks, staircases, strict=True):
            of_rank.append(plan.own_staircase(rank))
    return [sum((tile_work(s) for s in of_rank), TileWork(0, 0, 0)) for of_rank in staircases]


def total(works):
    return sum(works, TileWork(0, 0, 0))


def test_counting():
    rows = np.array([[0, 1, 0, 1], [1, 9, 0, 128], [9, 18, 0, 129]])  # q0, q1, k0, k1
    nothing = Rectangles(*np.empty((4, 0), dtype=np.int64))
    visible = np.zeros(18 * BLOCK_SIZE, dtype=np.int64)
    staircase = Staircase([Rectangles(*rows.T)], nothing, visible, visible, BLOCK_SIZE, 1000, 0)
    work = tile_work(staircase)
    assert (work.dense_tiles, work.leaf_tiles) == (1 + 1 + 2 * 2, 0)
    assert work.executed_pairs == 6 * 128 * 128
    assert work.overhead == 6 * 128 * 128 / 1000
    leaves = Staircase([], Rectangles(*rows[2:].T), visible, visible, BLOCK_SIZE, 1000, 0)
    assert tile_work(leaves).leaf_tiles == 4
    assert (work + tile_work(leaves)).leaf_share == 4 / 10
    assert tile_work(staircase, tile=16).dense_tiles == 1 + 8 * 8 + 9 * 9


def test_counts_beyond_int32():
    """2^27 blocks of 16 rows x 2^33 keys: 2^64 pairs, 2^50 tiles."""
    one = Rectangles(*np.array([[0], [2**27], [2**40], [2**40 + 2**33]]))
    nothing = Rectangles(*np.empty((4, 0), dtype=np.int64))
    empty = np.empty(0, dtype=np.int64)
    work = tile_work(Staircase([one], nothing, empty, empty, BLOCK_SIZE, 2**64, 0))
    assert work.dense_tiles == 2**24 * 2**26
    assert work.executed_pairs == 2**64
    assert work.overhead == 1.0


@pytest.mark.parametrize("strategy", ["lpt", "balanced"])
@pytest.mark.parametrize(("cp_size", "pure"), [(8, 1.05), (64, 1.065)])
def test_the_papers_shape(cp_size, pure, strategy):
    """Four samples of 256k. The bound is 1.05; cuts at tiles leave it far behind."""
    plan = paper_plan(cp_size, strategy)
    assert total(work_of(plan, NO_LEAVES)).overhead == pytest.approx(pure, abs=0.01)
    assert total(work_of(plan, LeafLimits())).overhead == pytest.approx(1.037, abs=0.006)
    works = work_of(plan, TILE_LEAF_LIMITS)
    assert max(work.overhead for work in works) < 1.015
    assert total(works).leaf_share < 0.02
    for rank in (0, cp_size - 1):
        staircase = plan.staircase(rank, TILE_LEAF_LIMITS)
        assert staircase.executed_pairs < 1.01 * staircase.needed_pairs
        assert len(staircase.levels) <= len(plan.staircase(rank, NO_LEAVES).levels) - 2


@pytest.mark.parametrize("cp_size", [8, 64])
def test_own_blocks_included(cp_size):
    """A block of 16 x 16 costs a whole tile as a range of its own: less than 1 % of the context."""
    plan = paper_plan(cp_size, "balanced")
    alone, both = (total(work_of(plan, TILE_LEAF_LIMITS, own=own)) for own in (False, True))
    assert both.overhead < 1.02
    assert both.executed_pairs < 1.007 * alone.executed_pairs


def test_evenly_spread_keys():
    """One sample in chunks of 8 rows: 512 steps over 4,096 local keys, the worst of that shape.

    A step of 6 keys is far below a tile: without leaves more than a third is wasted, and leaves of
    one tile of rows alone still waste a sixth.
    """
    plan = paper_plan(64, "lpt", samples=1, chunks_per_rank=512)
    assert total(work_of(plan, NO_LEAVES)).overhead > 1.35
    assert total(work_of(plan, LeafLimits())).overhead > 1.15
    works = work_of(plan, TILE_LEAF_LIMITS)
    assert max(work.overhead for work in works) < 1.04
    assert total(works).leaf_share < 0.065


def test_chunks_that_are_no_multiple_of_a_tile():
    """Chunk ends lie off the grid then; blocks that end there together still need no leaves."""
    plan = paper_plan(64, "balanced", length=250_000)
    works = work_of(plan, TILE_LEAF_LIMITS)
    assert total(works).overhead < 1.05
    assert total(works).leaf_share < 0.025


def random_prefixes(rng, block_size):
    """Documents with smooth, stepped and flat staircases."""
    starts, ends, start = [], [], 0
    for _ in range(rng.integers(1, 4)):
        blocks, length = int(rng.integers(0, 40)), int(rng.integers(1, 120))
        smooth = rng.integers(0, length + 1, blocks)
        stepped = rng.choice(rng.integers(0, length + 1, 4), blocks)
        flat = np.where(rng.random(blocks) < 0.5, length, smooth)
        ends.append(start + np.sort((smooth, stepped, flat)[rng.integers(0, 3)]))
        starts.append(np.full(blocks, start))
        start += length
    return np.concatenate(starts).astype(np.int64), np.concatenate(ends).astype(np.int64), start


@pytest.mark.parametrize("tile", [2, 4, 16])
def test_cut_at_tiles_every_pair_is_still_computed_once(tile):
    """Any limits: fewer keys than a tile, no leaves wanted, blocks larger than a tile."""
    rng = np.random.default_rng(tile)
    for _ in range(80):
        block_size = int(rng.integers(1, 7))
        start, end, num_keys = random_prefixes(rng, block_size)
        limits = LeafLimits(*rng.integers(0, (20, 30, 50)).tolist(), tile=tile)
        staircase = build_staircase(start, end, block_size, limits)
        count = np.zeros((start.size, num_keys), dtype=int)
        for level in staircase.levels:
            assert (level.q_end[:-1] <= level.q_start[1:]).all()
            assert (level.k_end[:-1] <= level.k_start[1:]).all()
            for q0, q1, k0, k1 in zip(*columns(level), strict=True):
                assert q0 < q1
                assert k0 < k1
                count[q0:q1, k0:k1] += 1
        leaves = staircase.leaves
        assert (leaves.q_end[:-1] <= leaves.q_start[1:]).all()
        for q0, q1, k0, k1 in zip(*columns(leaves), strict=True):
            for block in range(q0, q1):
                assert k0 < end[block]
                count[block, k0 : min(k1, int(end[block]))] += 1
        key = np.arange(num_keys)
        np.testing.assert_array_equal(count, (start[:, None] <= key) & (key < end[:, None]))


def columns(rectangles):
    return (
        rectangles.q_start.tolist(),
        rectangles.q_end.tolist(),
        rectangles.k_start.tolist(),
        rectangles.k_end.tolist(),
    )


def test_shape_of_a_small_staircase_cut_at_tiles():
    """Six blocks of one row, ends 3 5 7 9 11 13, tiles of 4."""
    start, end = np.zeros(6, int), np.array([3, 5, 7, 9, 11, 13])
    staircase = build_staircase(start, end, 1, LeafLimits(rows=4, keys=100, pairs=0, tile=4))
    # Nothing is shared for a whole tile; the upper four rows see 4 keys; two leaves do the rest.
    levels = [np.stack(columns(level), axis=1).tolist() for level in staircase.levels]
    assert levels == [[[2, 6, 0, 4]]]
    leaves = np.stack(columns(staircase.leaves), axis=1).tolist()
    assert leaves == [[0, 2, 0, 5], [2, 6, 4, 13]]


@pytest.mark.parametrize("windows", [(None,), (None, 300, 300)], ids=str)
def test_tiles_of_ranks_are_those_of_their_staircases(windows):
    layout, length = papers_layout(0, length=2**12, anchors=40)
    plan = build_plan(layout, length, 4, windows=windows)
    expected = []
    for rank in range(4):
        works = [tile_work(plan.own_staircase(rank, w)) for w in windows]
        works += [tile_work(plan.staircase(rank, TILE_LEAF_LIMITS, window=w)) for w in windows]
        expected.append(sum(work.dense_tiles + work.leaf_tiles for work in works))
    assert tiles_of_ranks(plan, TILE_LEAF_LIMITS).tolist() == expected
    assert tile_imbalance(plan) == max(expected) * 4 / sum(expected) - 1
    assert tile_imbalance(build_plan(*layout_of([(8, [], 3)], block_size=4), 4)) == 0.0


def test_own_blocks_are_priced_in_tiles_too():
    """One rank owns all kept blocks, and each of these fills a tile by itself."""
    layout, length = layout_of([(8192, list(range(0, 8192, 256)), 32)], block_size=16)
    plan = build_plan(layout, length, 2, chunks_per_rank=8, tiles=True)
    assert tile_imbalance(plan) == 0.0
    assert plan.context_work[0] < plan.context_work[1]


@pytest.mark.parametrize("workload", [papers_layout, uneven_layout])
def test_priced_in_tiles_the_ranks_tiles_are_more_even(workload):
    """At the cost of pairs, whose imbalance grows to what that of the tiles was."""
    layout, length = workload(1)
    pairs, tiles = (build_plan(layout, length, 32, chunks_per_rank=16, tiles=t) for t in (0, 1))
    assert tile_imbalance(tiles) < tile_imbalance(pairs) / 4
    assert pairs.imbalance < tiles.imbalance < 0.01
