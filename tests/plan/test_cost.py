"""The cost model of plans: by hand, and as a choice."""

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.cost import PlanCost, choose_plan, estimate_seconds
from megatron_splitkv.plan.row_source import RowSource
from tests.plan.layouts import layout_of, papers_layout


def by_hand(windows=(None,)):
    """Documents of 6 and 4 rows, two blocks of 2 each; rank 1 holds the last 2 rows of the first.

    Rank 0 owns blocks 0, 1 (anchors 3 and 5 of the first document), rank 1 blocks 2, 3 (anchors 1
    and 4, at rows 7 and 10, of the second, of 5 rows).
    """
    layout, length = layout_of([(6, [3, 5], 0), (5, [1, 4], 0)], block_size=2)
    return ContextPlan(layout, [0, 4, length], [0, 1], 2, "none", windows)


def test_estimate_by_hand():
    """Rank 0: (3 + 4) rows seen x 2, own blocks 2 x 4: 22 pairs, nobody else's query.

    Rank 1: block 1 sees row 4; blocks 2, 3 see 1 and 4 rows: 12 pairs, own 8, and 2 foreign rows.
    """
    plan = by_hand()
    assert plan.work.tolist() == [22, 20]
    # Query cast `auto` is `group` where the busiest rank attends at most 3/4: 3 of 4 blocks.
    assert plan.resolve_cast("auto") == "group"
    assert estimate_seconds(plan, PlanCost(1.0, 0.0)) == 22
    assert estimate_seconds(plan, PlanCost(1.0, 0.5)) == 22
    assert estimate_seconds(plan, PlanCost(1.0, 3.0)) == 20 + 2 * 3.0
    assert estimate_seconds(plan, PlanCost(0.0, 1.0)) == 2


def test_layers_with_windows_need_fewer_rows():
    """Block 1 (anchor 5) sees with a window of 1 no context at all: that layer moves nothing."""
    rows = PlanCost(0.0, 1.0)
    assert estimate_seconds(by_hand((None, None)), rows) == 4
    assert estimate_seconds(by_hand((None, 1)), rows) == 2
    assert estimate_seconds(by_hand((1,)), rows) == 0


def test_all_queries_travel_where_that_is_what_happens():
    """Attention gathers everything if the busiest rank attends more than 3/4 of all blocks."""
    layout, length = papers_layout(0, length=2**14, anchors=64)
    plan = build_plan(layout, length, 8)
    assert plan.resolve_cast("auto") == "all"
    foreign = (plan.num_blocks - plan.blocks_per_rank) * plan.block_size
    assert estimate_seconds(plan, PlanCost(0.0, 1.0)) == foreign


def test_price_of_a_layer():
    """2 heads of 4: 14 x 8 operations a pair; 4 x 8 elements of 2 bytes and 3 x 2 fp32 a row."""
    cost = PlanCost.of_layer(
        num_query_heads=2, head_dim=4, itemsize=2, flops=112.0, bytes_per_second=88.0
    )
    assert (cost.pair_seconds, cost.row_seconds) == (1.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_dear_rows_are_spared_and_dear_pairs_balanced(seed):
    layout, length = papers_layout(seed, length=2**16)
    balanced = build_plan(layout, length, 8)
    local = build_plan(layout, length, 8, strategy="balanced-local")
    dear_rows, dear_pairs = PlanCost(1e-12, 1e-6), PlanCost(1e-6, 1e-12)
    assert choose_plan([balanced, local], dear_rows) is local
    assert choose_plan([balanced, local], dear_pairs) is balanced
    assert choose_plan([local, balanced], dear_pairs) is balanced
    # In between it turns once: where a row costs what the pairs do that it saves.
    prices = 10.0 ** np.arange(-12, -4)
    chosen = [choose_plan([balanced, local], PlanCost(1e-9, row)) is local for row in prices]
    assert chosen == sorted(chosen)
    assert 0 < sum(chosen) < len(chosen)


def test_the_same_choice_from_arrays_and_in_any_order_of_ranks():
    layout, length = papers_layout(1, length=2**14, anchors=64)
    plans = [
        build_plan(layout, length, 4, strategy=name) for name in ("balanced", "balanced-local")
    ]
    cost = PlanCost(1e-10, 1e-7)
    again = [ContextPlan.from_arrays(plan.to_arrays()) for plan in plans]
    assert [estimate_seconds(plan, cost) for plan in plans] == [
        estimate_seconds(plan, cost) for plan in again
    ]
    assert choose_plan(again, cost).digest == choose_plan(plans, cost).digest


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_auto_is_the_cheaper_plan(cp_size):
    layout, length = papers_layout(2, length=2**15, anchors=128)
    settings = {"chunks_per_rank": 8, "windows": (None, 512)}
    for row_seconds, name in ((1e-6, "balanced-local"), (1e-15, "balanced")):
        cost = PlanCost(1e-10, row_seconds)
        plan = build_plan(layout, length, cp_size, strategy="auto", cost=cost, **settings)
        expected = build_plan(layout, length, cp_size, strategy=name, **settings)
        assert (plan.digest, plan.strategy) == (expected.digest, name)


def test_auto_keeps_locality_where_rows_are_already():
    layout, length = papers_layout(2, length=2**15)
    source = RowSource.zigzag(length, 8)
    plan = build_plan(layout, length, 8, strategy="auto", cost=PlanCost(1e-12, 1e-6), source=source)
    assert plan.strategy == "balanced-local"
    assert (
        max(plan.query_cast(rank, "group").blocks.size for rank in range(8))
        <= 0.31 * plan.num_blocks
    )


def test_auto_needs_a_cost():
    layout, length = papers_layout(0, length=2**14, anchors=16)
    with pytest.raises(ConfigError, match="give build_plan a cost, or name a strategy"):
        build_plan(layout, length, 4, strategy="auto")


def test_of_equals_the_first():
    plans = [by_hand(), by_hand()]
    assert choose_plan(plans, PlanCost(1.0, 1.0)) is plans[0]


@pytest.mark.parametrize("prices", [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_prices_that_are_none(prices):
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        PlanCost(*prices)


@pytest.mark.parametrize("name", ["num_query_heads", "head_dim", "itemsize", "flops"])
def test_shapes_and_speeds_are_positive(name):
    sizes = {"num_query_heads": 2, "head_dim": 4, "itemsize": 2, "flops": 1.0}
    with pytest.raises(ConfigError, match=f"{name} 0 must be positive"):
        PlanCost.of_layer(**sizes | {name: 0}, bytes_per_second=1.0)
