"""Strategy `auto` as a pure function of shapes, plans and links."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.choice import (
    HOP_BYTE_SECONDS,
    HOP_SLOWDOWN,
    block_order_of,
    choose_for_packs,
    choose_strategy,
    estimate_layer_seconds,
    links_of_group,
    plan_cost,
)
from megatron_splitkv.attention.layer_shape import LayerShape, Load
from megatron_splitkv.attention.strategies.volumes import volume
from megatron_splitkv.comm.links import PRESETS, Links
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.scale import FITTED

FAST, SHARED, LOOPBACK = (PRESETS[n] for n in ("nvlink-400g", "nvlink-400g-shared", "loopback"))
# 64 key heads: what Ulysses likes.
MHA = LayerShape(
    query_rows=32768,
    context_rows=2**20,
    cp_size=64,
    heads=64,
    kv_heads=64,
    head_width=128,
    hidden_size=4096,
    itemsize=2,
)


def documents(
    count: int,
    length: int,
    anchors: int,
    cp_size: int,
    strategy: str,
    block_order: str = "contiguous",
) -> ContextPlan:
    generator = np.random.default_rng(0)
    starts = np.arange(count, dtype=np.int64) * length
    drawn = [np.sort(generator.choice(length, anchors, replace=False)) for _ in range(count)]
    layout = BlockLayout(
        np.concatenate(drawn) + np.repeat(starts, anchors),
        np.repeat(starts, anchors),
        np.ones(count * anchors, dtype=np.bool_),
        16,
    )
    rows = count * length
    return build_plan(layout, rows, cp_size, strategy=strategy, block_order=block_order)


def grid() -> list[tuple[LayerShape, Links]]:
    heads = ((32, 32), (32, 8), (12, 1))
    sizes = product((512, 32768), (2**15, 2**20), (2, 3, 8, 64), heads, PRESETS.values())
    return [
        (LayerShape(q // p * p, s, p, n, kv, 128, hidden_size=4096, itemsize=2), links)
        for q, s, p, (n, kv), links in sizes
    ]


def test_no_single_strategy_is_ever_better_in_the_model() -> None:
    chosen = set()
    for shape, links in grid():
        choice = choose_strategy(shape, links)
        singles = {}
        for strategy in CP_COMM_TYPES:
            try:
                singles[strategy] = estimate_layer_seconds(strategy, shape, links)
            except ConfigError:
                assert strategy in choice.excluded
        assert choice.seconds == singles
        assert singles[choice.strategy] == min(singles.values())
        assert choice.plan_strategy == "balanced"
        chosen.add(choice.strategy)
    assert {"splitkv", "a2a"} <= chosen


def test_nothing_that_a_launch_can_have_is_better_in_the_model() -> None:
    """Every strategy with every plan, its blocks dealt out as a launch with it deals them out."""
    quick = replace(FAST, ranks_per_node=2, call_latency=1e-6)
    chosen, mirrored_pays = set(), 0
    for count, length, ranks in product((1, 4), (2**12, 2**15), (2, 3, 8)):
        for kv_heads, beside in product((4, 32), ((), ("p2p",), ("splitkv",))):
            layer = LayerShape(0, 0, ranks, 32, kv_heads, 128, hidden_size=4096, itemsize=2)
            packs = {
                (plan, order): [
                    layer.with_plan(documents(count, length, 64, ranks, plan, order), "auto", 2)
                ]
                for plan in ("none", "balanced", "balanced-local")
                for order in ("contiguous", "mirrored")
            }
            choice = choose_for_packs(packs, quick, beside=beside)
            best = {}
            for strategy in choice.seconds:
                order = block_order_of((strategy, *beside))
                estimates = [
                    estimate_layer_seconds(strategy, given[0], quick)
                    for (_, of_plan), given in packs.items()
                    if of_plan == order
                ]
                best[strategy] = min(estimates)
                mirrored_pays += order == "mirrored" and best[strategy] < min(
                    estimate_layer_seconds(strategy, given[0], quick)
                    for (_, of_plan), given in packs.items()
                    if of_plan == "contiguous"
                )
            assert choice.seconds == best
            assert best[choice.strategy] == min(best.values())
            assert choice.block_order == block_order_of((choice.strategy, *beside))
            assert ("and mirrored blocks" in choice.reason) == (choice.block_order == "mirrored")
            chosen.add(choice.strategy)
    assert {"splitkv", "all_gather"} <= chosen
    assert mirrored_pays > 50


def test_who_works_where_queries_are_gets_mirrored_blocks() -> None:
    for strategy in ("p2p", "ringx", "lv_xattn", "all_gather"):
        assert block_order_of((strategy,)) == block_order_of(("a2a", strategy)) == "mirrored"
        assert block_order_of((strategy, "splitkv")) == "contiguous"
    assert block_order_of(("a2a",)) == block_order_of(("splitkv",)) == "contiguous"


def test_a_call_of_the_kernel_costs_what_the_machine_says() -> None:
    """On a machine where it is next to nothing, a gather of few keys is ahead."""
    slow = replace(FAST, ranks_per_node=2)
    layer = LayerShape(1024, 4096, 4, 32, 4, 128, hidden_size=2048, itemsize=2, node_ranks=2)
    spent = [
        estimate_layer_seconds("all_gather", layer, replace(slow, call_latency=latency))
        for latency in (0.0, 1e-3)
    ]
    assert spent[1] - spent[0] == pytest.approx(2 * 4 * 1e-3)
    assert choose_strategy(layer, slow).strategy == "splitkv"
    assert choose_strategy(layer, replace(slow, call_latency=1e-6)).strategy == "all_gather"


def test_split_kv_where_queries_are_few() -> None:
    for links, ranks in product(PRESETS.values(), (8, 64)):
        few = replace(MHA, query_rows=2048, cp_size=ranks)
        choice = choose_strategy(few, links)
        assert choice.strategy == "splitkv"
        assert "p2p" in choice.reason.split("next best: ")[1]


def test_ulysses_beyond_its_crossover() -> None:
    """Same work, so bytes decide: P > 1 + (S + Q) H_kv / (Q H_q). All on one level."""
    one_level = SplitKVOptions(ranks_per_node=1)
    many = replace(MHA, query_rows=131072)
    for links in (FAST, SHARED):
        below = choose_strategy(replace(MHA, cp_size=16), links, one_level)  # crossover at 34
        assert below.strategy == "splitkv"
        beyond = choose_strategy(many, links, one_level)  # crossover at 10
        assert beyond.strategy == "a2a"
        assert beyond.reason.startswith("--cp-comm-type auto chose a2a with plan balanced: ")


def test_what_is_added_up_inside_nodes_moves_the_crossover() -> None:
    """Partial results shrink on their way, transposed heads do not."""
    many = replace(MHA, query_rows=131072)
    one, two = (choose_strategy(many, SHARED, SplitKVOptions(ranks_per_node=n)) for n in (1, None))
    assert (one.strategy, two.strategy) == ("a2a", "splitkv")
    assert one.seconds["a2a"] == two.seconds["a2a"]
    inside = replace(many, cp_size=8)  # of one node
    assert choose_strategy(inside, SHARED) == choose_strategy(
        inside, SHARED, SplitKVOptions(ranks_per_node=1)
    )


def test_ulysses_is_left_out_with_the_reason_where_ranks_do_not_divide_heads() -> None:
    choice = choose_strategy(replace(MHA, heads=12, kv_heads=4, cp_size=8), LOOPBACK)
    assert list(choice.excluded) == ["a2a"]
    assert "12 query heads" in choice.excluded["a2a"]
    assert "; without a2a: " in choice.reason
    assert choice.seconds.keys() == set(CP_COMM_TYPES) - {"a2a"}


def test_one_document_leaves_the_owners_of_late_queries_twice_the_work() -> None:
    """Keys stay balanced; strategies that bring keys to queries are not."""
    plan = documents(1, 2**14, 512, 8, "balanced")
    load = Load.of_plan(plan, "auto", 8)
    assert load.pairs.key_owners < 1.001 * load.pairs.total / 8
    assert load.pairs.query_owners > 1.8 * load.pairs.total / 8
    shape = replace(MHA, cp_size=8).with_plan(plan, "auto", 8)
    mirrored = documents(1, 2**14, 512, 8, "balanced", "mirrored")
    load = Load.of_plan(mirrored, "auto", 8)
    even = replace(shape, load=None).loaded.pairs  # what stands for a plan, blocks as wanted
    for name in ("total", "key_owners", "query_owners", "hops", "query_turns", "key_turns"):
        expected = getattr(load.pairs, name)
        assert getattr(even, name) == pytest.approx(expected, rel=0.1), name


def test_documents_that_stay_on_few_ranks_send_less() -> None:
    shape = replace(MHA, cp_size=8)
    packs = {
        (name, order): [shape.with_plan(documents(4, 2**14, 128, 8, name, order), "auto", 2)]
        for name in ("balanced", "balanced-local")
        for order in ("contiguous", "mirrored")
    }
    few, all_of_them = packs["balanced-local", "contiguous"][0], packs["balanced", "contiguous"][0]
    near = few.load
    assert near is not None
    assert near.attended_rows < all_of_them.query_rows / 3
    traffic = few.traffic("q", "heads")
    assert traffic.query_cast == "group"
    assert traffic.query_share == near.sent_rows / (all_of_them.query_rows * 7 / 8) < 0.5
    assert all_of_them.traffic("q", "heads").query_cast == "all"
    slow = replace(LOOPBACK, ranks_per_node=2, attention_flops=1e13, dense_flops=1e13)
    choice = choose_for_packs(packs, slow)
    assert (choice.strategy, choice.plan_strategy) == ("splitkv", "balanced-local")
    assert "plan balanced-local" in choice.reason
    everywhere = choose_for_packs(packs, slow, SplitKVOptions(query_cast="all"))
    # Asked for by the caller, who made the shapes for it; the volumes follow the shapes.
    assert everywhere.seconds["splitkv"] == choice.seconds["splitkv"]


def test_rows_sent_are_those_of_the_plans_casts() -> None:
    for strategy, cast, per_node in product(
        ("balanced", "balanced-local"), ("all", "auto"), (2, 8)
    ):
        plan = documents(4, 2**12, 32, 8, strategy)
        load = Load.of_plan(plan, cast, per_node)
        casts = [plan.query_cast(rank, cast) for rank in range(8)]
        assert load.attended_rows == max(c.blocks.size for c in casts) * 16
        sent = [
            [s.size * 16 * (to != rank) for to, s in enumerate(c.sent)]
            for rank, c in enumerate(casts)
        ]
        most = max(range(8), key=lambda rank: sum(sent[rank]))
        far = sum(rows for to, rows in enumerate(sent[most]) if to // per_node != most // per_node)
        assert load.sent_rows == sum(sent[most])
        assert load.far_share == pytest.approx(far / sum(sent[most]))


def test_transfers_hide_behind_a_loops_other_steps_only() -> None:
    """A ring of two ranks with endless compute exposes what goes home after the last step."""
    shape = replace(MHA, cp_size=2)
    slow_kernel = replace(FAST, attention_flops=1e6)
    pairs = HOP_SLOWDOWN * 4 * 64 * 128 * 3.5 * shape.loaded.pairs.hops
    compute = 2 * 2 * 50e-6 + pairs / 1e6
    shard = shape.context_rows / 2 * 64 * 128 * 4
    home = 2 * (FAST.ring_hop_seconds(shard, 2) + HOP_BYTE_SECONDS * shard)
    exposed = estimate_layer_seconds("p2p", shape, slow_kernel) - compute
    assert exposed == pytest.approx(home, rel=1e-3)
    endless = replace(FAST, attention_flops=1e30, intra_latency=0.0)
    moved = volume("p2p", shape.traffic("q", "heads"))
    everything = moved.bytes * (1 / endless.intra_bandwidth + HOP_BYTE_SECONDS)
    everything += 2 * 50e-6  # half the calls hide some
    assert estimate_layer_seconds("p2p", shape, endless) == pytest.approx(everything, rel=1e-6)


def test_hops_cost_what_the_cluster_model_says() -> None:
    assert (FITTED.hop_slowdown, FITTED.hop_byte_seconds) == (HOP_SLOWDOWN, HOP_BYTE_SECONDS)


def test_keys_gathered_again_are_paid_twice() -> None:
    own = SplitKVOptions(save="own")
    for strategy in CP_COMM_TYPES:
        again = estimate_layer_seconds(strategy, MHA, SHARED, own)
        once = estimate_layer_seconds(strategy, MHA, SHARED)
        assert (again > once) == (strategy in ("splitkv", "all_gather")), strategy


def test_tensor_parallel_groups_share_a_node_and_its_cards() -> None:
    assert links_of_group(FAST, 1) == FAST
    pair = links_of_group(FAST, 2)
    assert (pair.ranks_per_node, pair.nics_per_node, pair.nic_bandwidth) == (4, 4, 50e9)
    shared = links_of_group(SHARED, 4)
    assert (shared.ranks_per_node, shared.node_bandwidth) == (2, 50e9 / 4)
    assert shared.inter_bandwidth == SHARED.inter_bandwidth
    assert links_of_group(FAST, 16).ranks_per_node == 1


def test_plans_are_priced_by_the_same_links() -> None:
    within, across = (plan_cost(replace(MHA, cp_size=p), SHARED) for p in (8, 16))
    assert within.pair_seconds == across.pair_seconds == 14 * 64 * 128 / SHARED.attention_flops
    row = 64 * (4 * 128 * 2 + 12)
    assert within.row_seconds == row / SHARED.intra_bandwidth
    assert across.row_seconds == row / SHARED.inter_bandwidth


def test_unknown_strategies_are_named() -> None:
    with pytest.raises(ConfigError, match="strategy 'auto' is not known"):
        estimate_layer_seconds("auto", MHA, FAST)
