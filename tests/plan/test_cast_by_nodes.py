"""Query cast `auto` over several nodes: what crosses between them decides."""

import numpy as np
import pytest

from megatron_splitkv.attention.layer_shape import LayerShape, Load
from megatron_splitkv.attention.strategies.volumes import volume
from megatron_splitkv.plan import build_plan
from tests.plan.layouts import layout_of


def plan_of(documents, cp_size, owner):
    """Documents of 8 rows with 4 blocks each, their rows with one rank each."""
    layout, length = layout_of([(8, [1, 3, 5, 7], 0)] * documents, block_size=4)
    plan = build_plan(layout, length, cp_size, strategy="none", chunks_per_rank=1)
    object.__setattr__(plan, "chunk_bounds", np.arange(documents + 1) * 8)
    object.__setattr__(plan, "chunk_owner", np.array(owner))
    return plan


def test_documents_inside_a_node_go_to_their_group():
    """Rank r's document lies with its neighbour: every query leaves its rank, none its node."""
    plan = plan_of(8, 8, [1, 0, 3, 2, 5, 4, 7, 6])
    assert plan.resolve_cast("auto") == "group"
    assert plan.resolve_cast("auto", node_ranks=2) == "group"
    assert plan.resolve_cast("auto", node_ranks=4) == "group"


def test_documents_over_all_nodes_go_to_all_where_that_crosses_less():
    """Ranks need 4 or 5 of 8 ranks' queries, most of them of the other node, one by one.

    To all: a ring's share of 28 / 4 blocks, and 4 blocks back. To a group: 16 there and 16 back.
    """
    layout, length = layout_of([(8, [1, 3, 5, 7], 0)] * 8, block_size=4)
    plan = build_plan(layout, length, 8, strategy="none", chunks_per_rank=1)
    far = np.zeros((8, 32), dtype=bool)
    for rank in range(8):
        for owner in range(8):
            far[rank, 4 * owner : 4 * owner + 4] = rank // 4 != owner // 4
    object.__setattr__(plan, "needs", lambda window=None: far)
    assert plan.resolve_cast("auto") == "group"  # 20 of 32 blocks
    assert plan.resolve_cast("auto", node_ranks=4) == "all"
    assert plan.resolve_cast("group", node_ranks=4) == "group"  # as asked
    assert plan.resolve_cast("auto", node_ranks=4) == "all"  # kept apart from the other answer
    assert plan.resolve_cast("auto") == "group"


@pytest.mark.parametrize("node_ranks", [1, 2, 4])
def test_the_estimate_has_the_cast_that_runs(node_ranks):
    plan = plan_of(8, 8, [1, 0, 3, 2, 5, 4, 7, 6])
    load = Load.of_plan(plan, "auto", 2, node_ranks)
    assert load.query_cast == plan.resolve_cast("auto", node_ranks=node_ranks) == "group"
    shape = LayerShape(0, 0, 8, 4, 2, 8, 32, 2, node_ranks=node_ranks).with_plan(plan, "auto", 2)
    traffic = shape.traffic("q", "heads", node_ranks)
    assert traffic.query_cast == "group"
    assert not traffic.takes_two_levels


def test_a_group_cast_to_everybody_is_still_one():
    """Two ranks that need each other's queries: all of them travel, pair by pair."""
    plan = plan_of(2, 2, [1, 0])
    load = Load.of_plan(plan, "group", 1)
    assert load.query_cast == "group"
    shape = LayerShape(0, 0, 2, 4, 2, 8, 32, 2).with_plan(plan, "group", 1)
    traffic = shape.traffic("q", "heads")
    assert (traffic.query_cast, traffic.query_share) == ("group", 1.0)
    moved = volume("splitkv", traffic)
    assert {m.op for m in (*moved.forward.moves, *moved.backward.moves)} == {"all_to_all_v"}
