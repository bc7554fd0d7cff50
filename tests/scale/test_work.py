"""Work by owners against a mask counted cell by cell, and the loops' sums by hand."""

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.pair_work import pairs_by_owner
from megatron_splitkv.scale.work import (
    most_work,
    pair_work,
    plan_of,
    query_cast,
    total_work,
)
from megatron_splitkv.scale.workload import Workload, weak


def count_pairs(plan: ContextPlan) -> np.ndarray:
    """Query owner x key owner, one cell of the mask after the other."""
    owner_of_row = np.empty(plan.context_length, dtype=int)
    for rank in range(plan.cp_size):
        owner_of_row[plan.rows(rank)] = rank
    pairs = np.zeros((plan.cp_size, plan.cp_size), dtype=int)
    layout = plan.layout
    for rank in range(plan.cp_size):
        for block in plan.blocks(rank):
            if layout.block_keep_mask[block]:
                pairs[rank, rank] += plan.block_size**2
                for x in range(layout.document_starts[block], layout.anchor_positions[block]):
                    pairs[rank, owner_of_row[x]] += plan.block_size
    return pairs


@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt", "balanced"])
@pytest.mark.parametrize(
    ("samples", "context", "queries", "ranks"), [(2, 101, 48, 3), (3, 64, 32, 4), (1, 200, 80, 5)]
)
def test_pairs_by_owner(
    strategy: str, samples: int, context: int, queries: int, ranks: int
) -> None:
    plan = plan_of(Workload(samples, context, queries, ranks), strategy)
    pairs = pairs_by_owner(plan)
    np.testing.assert_array_equal(pairs, count_pairs(plan))
    np.testing.assert_array_equal(pairs.sum(), plan.work.sum())


def test_padding_blocks_cost_nothing() -> None:
    """One block on two ranks: the second rank's block is padding."""
    plan = plan_of(Workload(1, 100, 16, 2), "none")
    assert not plan.layout.block_keep_mask[1]
    np.testing.assert_array_equal(pairs_by_owner(plan), count_pairs(plan))
    keep = np.array([True, False, True, True])
    blocks = BlockLayout(np.array([30, 40, 60, 80]), np.array([0, 0, 50, 50]), keep, 16)
    uneven = build_plan(blocks, 100, 2, strategy="zigzag")
    np.testing.assert_array_equal(pairs_by_owner(uneven), count_pairs(uneven))


def test_sums_of_loops_by_hand() -> None:
    """Two samples on two ranks, contiguous: all work lies on the diagonal, in the first hop."""
    workload = Workload(2, 1024, 64, 2)
    pairs = pairs_by_owner(plan_of(workload, "none"))
    a, b = pairs[0, 0], pairs[1, 1]
    assert pairs[0, 1] == pairs[1, 0] == 0
    work = pair_work(workload, "none")
    assert work.hops == work.query_owners == max(a, b)
    # Turns serialise what hops do side by side.
    assert work.query_turns == work.key_turns == a + b
    assert total_work(workload) == a + b


def test_loops_keep_step() -> None:
    """Each hop and each turn waits for its slowest rank, under a placement with work everywhere."""
    workload = Workload(2, 640, 128, 4)
    pairs = pairs_by_owner(plan_of(workload, "zigzag"))
    work = pair_work(workload, "zigzag")
    assert work.hops == sum(max(pairs[i, (i + t) % 4] for i in range(4)) for t in range(4))
    assert work.query_turns == sum(pairs[i].max() for i in range(4))
    assert work.key_turns == sum(pairs[:, i].max() for i in range(4))
    assert most_work(workload, "zigzag") == pairs.sum(axis=0).max()
    for loop in (work.hops, work.query_turns, work.key_turns):
        assert loop >= pairs.sum() / 4


def test_the_planner_balances_the_paper_workload() -> None:
    workload = weak(16)
    mean = total_work(workload) / 16
    assert most_work(workload, "lpt") < 1.01 * mean
    assert most_work(workload, "none") > 1.3 * mean


def test_group_cast_by_hand() -> None:
    """8 samples on 16 ranks, 2 ranks a sample: a query row goes to one other rank, of its node."""
    workload = Workload(8, 4096, 64, 16)
    cast = query_cast(workload, "none", 8)
    own = 8 * 64 // 16
    assert (cast.attended, cast.intra, cast.inter) == (64, own, 0)
    # With one rank a node that other rank is elsewhere.
    assert query_cast(workload, "none", 1).inter == own
    # Every rank holds keys of every sample: all rows go everywhere.
    everywhere = query_cast(workload, "zigzag", 8)
    assert everywhere.attended == workload.query_rows
    assert (everywhere.intra, everywhere.inter) == (7 * own, 8 * own)


def test_anchors_lie_in_the_response() -> None:
    workload = Workload(3, 1000, 160, 2)
    layout = workload.layout()
    inside = (layout.anchor_positions - layout.document_starts).reshape(3, 10)
    assert inside.min() >= 250
    assert inside.max() < 1000
    assert (np.diff(inside, axis=1) > 0).all()
    assert Workload(3, 1000, 160, 64).layout() is layout


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 100, 16, 2), "at least 1"),
        ((1, 100, 20, 2), "whole blocks of 16"),
        ((1, 10, 160, 2), "do not fit a sample's response"),
    ],
)
def test_impossible_workloads(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(*sizes)
