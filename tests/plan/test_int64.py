"""Plans of 2^34 context rows are exact: each number against Python's unbounded integers."""

from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_splitkv.config import PLAN_STRATEGIES
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, LeafLimits, build_plan

LENGTH = 2**34  # on six ranks each rank's local rows exceed 32 bits too
STARTS = (0, LENGTH // 3, 2 * LENGTH // 3)
END = LENGTH - 1000  # a tail without documents


def huge_layout(block_size, anchors=128):
    """Anchors at bounds of chunks, at the documents' very ends, and anywhere; padding between."""
    rng = np.random.default_rng(0)
    positions, starts, keep = [], [], []
    for start, end in pairwise((*STARTS, END)):
        # The ends of the first chunk under `lpt` and `zigzag`: the next key is another rank's.
        special = [start + n for cut in (LENGTH // 192, LENGTH // 36) for n in (cut, cut + 1)]
        drawn = rng.integers(start, end, anchors - 1 - len(special)).tolist()
        positions += [*sorted(drawn + special), end - 1, start]
        starts += [start] * (anchors + 1)
        keep += [True] * anchors + [False]
    return BlockLayout(positions, starts, keep, block_size)


def seen_by_blocks(layout):
    """(first key, end of keys) of every block in Python integers; empty for padding."""
    blocks = zip(
        layout.document_starts.tolist(),
        layout.anchor_positions.tolist(),
        layout.block_keep_mask.tolist(),
        strict=True,
    )
    return [(start, anchor if kept else start) for start, anchor, kept in blocks]


def chunks_of(plan):
    """(start, end, owner) of every chunk in Python integers."""
    bounds = plan.chunk_bounds.tolist()
    return list(zip(bounds[:-1], bounds[1:], plan.chunk_owner.tolist(), strict=True))


def rectangles(parts):
    for part in parts:
        columns = (part.q_start, part.q_end, part.k_start, part.k_end)
        assert {column.dtype for column in columns} == {np.dtype(np.int64)}
        yield from zip(*(column.tolist() for column in columns), strict=True)


@pytest.fixture(autouse=True)
def _no_rows(monkeypatch):
    def rows(self, rank):
        raise AssertionError("2^34 rows must not be walked")

    monkeypatch.setattr(ContextPlan, "rows", rows)


NEEDS_KAHYPAR = pytest.mark.skipif(find_spec("kahypar") is None, reason="needs KaHyPar")
STRATEGIES = [
    pytest.param(name, marks=NEEDS_KAHYPAR) if name == "hypergraph" else name
    for name in PLAN_STRATEGIES
]


@pytest.fixture(scope="module", params=STRATEGIES)
def plan(request):
    return build_plan(huge_layout(16), LENGTH, 6, strategy=request.param)


def test_prices(plan):
    seen = seen_by_blocks(plan.layout)
    expected = [
        16 * sum(max(0, min(anchor, end) - max(first, start)) for first, anchor in seen)
        for start, end, _ in chunks_of(plan)
    ]
    assert plan.chunk_work.dtype == plan.work.dtype == np.int64
    assert plan.chunk_work.tolist() == expected
    load = [0] * plan.cp_size
    for price, (*_, owner) in zip(expected, chunks_of(plan), strict=True):
        load[owner] += price
    assert plan.context_work.tolist() == load
    assert sum(load) == 16 * sum(anchor - first for first, anchor in seen) > 2**42


def test_rows_of_ranks(plan):
    held = [0] * plan.cp_size
    for start, end, owner in chunks_of(plan):
        held[owner] += end - start
    assert sum(held) == LENGTH
    assert max(held) > 2**31
    assert [plan.num_rows(rank) for rank in range(plan.cp_size)] == held
    ranges = sorted(r for rank in range(plan.cp_size) for r in plan.row_ranges(rank).tolist())
    assert ranges[0][0] == 0
    assert ranges[-1][1] == LENGTH
    assert all(left[1] == right[0] for left, right in pairwise(ranges))


def test_key_ranges_and_needs(plan):
    seen = seen_by_blocks(plan.layout)
    for rank in range(plan.cp_size):
        mine = [(start, end) for start, end, owner in chunks_of(plan) if owner == rank]

        def rows_before(position, mine=mine):
            return sum(max(0, min(position, end) - start) for start, end in mine)

        start, end = plan.key_ranges(rank)
        assert start.dtype == end.dtype == np.int64
        kept = plan.layout.block_keep_mask.tolist()
        expected = [
            (rows_before(first), rows_before(anchor)) if keep else (0, 0)
            for (first, anchor), keep in zip(seen, kept, strict=True)
        ]
        assert list(zip(start.tolist(), end.tolist(), strict=True)) == expected
        assert plan.needs()[rank].tolist() == [last > first for first, last in expected]


@pytest.mark.parametrize("limits", [LeafLimits(0, 0, 0), LeafLimits(128, 2**40, 0)])
def test_staircases(plan, limits):
    """Every block's parts join to its key range, and the pairs add up."""
    for rank in range(plan.cp_size):
        staircase = plan.staircase(rank, limits)
        assert staircase.row_start.dtype == staircase.row_end.dtype == np.int64
        start, end = (keys.tolist() for keys in plan.key_ranges(rank))
        assert staircase.row_start.tolist() == [key for key in start for _ in range(16)]
        assert staircase.row_end.tolist() == [key for key in end for _ in range(16)]
        parts = [[] for _ in start]
        executed = 0
        for q0, q1, k0, k1 in rectangles([*staircase.levels, staircase.leaves]):
            executed += 16 * (q1 - q0) * (k1 - k0)
            for block in range(q0, q1):
                parts[block].append((max(k0, start[block]), min(k1, end[block])))
        for block, ranges in enumerate(parts):
            joined = sorted(r for r in ranges if r[0] < r[1])
            edges = [start[block], *(last for _, last in joined)]
            assert [first for first, _ in joined] == edges[:-1]
            assert edges[-1] == end[block]
        needed = 16 * sum(last - first for first, last in zip(start, end, strict=True))
        assert staircase.needed_pairs == needed == plan.context_work[rank]
        assert staircase.executed_pairs == executed >= needed
        assert bool(len(staircase.leaves)) == (limits.rows > 0 and needed > 0)


def test_survives_collation_and_digest(plan):
    tensors = {name: torch.from_numpy(array) for name, array in plan.to_arrays().items()}
    again = ContextPlan.from_arrays(tensors)
    assert again.digest == plan.digest
    assert again.chunk_bounds.tolist() == plan.chunk_bounds.tolist()
    assert again.context_length == LENGTH


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_beyond_the_integers_of_float64(strategy):
    """Blocks of 2^17 + 1 slots: work above 2^53, where one lost pair shows in Python alone."""
    size = 2**17 + 1
    plan = build_plan(huge_layout(size), LENGTH, 6, strategy=strategy)
    seen = seen_by_blocks(plan.layout)
    kept = plan.layout.block_keep_mask.reshape(6, -1).sum(axis=1).tolist()
    context = [0] * 6
    for start, end, owner in chunks_of(plan):
        context[owner] += size * sum(max(0, min(a, end) - max(s, start)) for s, a in seen)
    expected = [pairs + own * size**2 for pairs, own in zip(context, kept, strict=True)]
    assert plan.work.tolist() == expected
    assert max(expected) > 2**53
    assert plan.imbalance == max(expected) * 6 / sum(expected) - 1


def test_local_plans_stay_local():
    """A pair of ranks a document: a price that overflowed would refuse the groups."""
    plan = build_plan(huge_layout(16), LENGTH, 6, strategy="balanced-local")
    assert plan.imbalance < 0.05
    assert plan.needs().mean() < 0.35
    work = plan.work.reshape(3, 2)
    assert (abs(np.diff(work)) < work[:, :1] // 1000).all()


def test_own_blocks():
    """More own rows than int32 can square: 100,000 slots a block."""
    plan = build_plan(BlockLayout([5], [0], [True], 100_000), 10, 1)
    own = plan.own_staircase(0)
    assert own.needed_pairs == own.executed_pairs == 10**10
    assert plan.work.tolist() == [5 * 10**5 + 10**10]
    assert list(rectangles(own.levels)) == [(0, 1, 0, 100_000)]
