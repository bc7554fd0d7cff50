"""Where queries are gathered and outputs scattered, by estimate over the links of a machine."""

from dataclasses import replace

import pytest

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.attention.placement import choose_places, place_seconds
from megatron_splitkv.attention.strategies.volumes import Move
from megatron_splitkv.attention.transfers import move_seconds, node_ranks
from megatron_splitkv.comm.links import PRESETS, default_links

AUTO = SplitKVOptions()
SHARED = PRESETS["nvlink-400g-shared"]
# The drafter of Qwen3.5-35B-A3B over 1M tokens on 64 ranks: its heads are wider than its rows.
SHAPE = LayerShape(
    query_rows=32768,
    context_rows=2**20,
    cp_size=64,
    heads=16,
    kv_heads=2,
    head_width=256,
    hidden_size=2048,
    itemsize=2,
)


def test_the_choice_weighs_bytes_against_repeated_projections() -> None:
    narrow = choose_places(AUTO, SHAPE, SHARED)
    assert (narrow.gather, narrow.scatter) == ("hidden", "proj")
    assert "gathers hidden (by estimate) and scatters proj (by estimate)" in narrow.reason
    wide_rows = choose_places(AUTO, replace(SHAPE, hidden_size=5120), SHARED)
    assert (wide_rows.gather, wide_rows.scatter) == ("q", "heads")
    halved = choose_places(AUTO, replace(SHAPE, heads=8, kv_heads=1), SHARED)  # tp 2
    assert (halved.gather, halved.scatter) == ("q", "heads")
    fast_links = choose_places(AUTO, SHAPE, PRESETS["nvlink-400g"])
    assert (fast_links.gather, fast_links.scatter) == ("q", "heads")
    slow_processor = choose_places(AUTO, SHAPE, replace(SHARED, dense_flops=1e12))
    assert (slow_processor.gather, slow_processor.scatter) == ("q", "heads")
    alone = choose_places(AUTO, replace(SHAPE, cp_size=1), SHARED)
    assert (alone.gather, alone.scatter) == ("q", "heads")


def test_the_reason_names_the_links() -> None:
    assert "over links nvlink-400g-shared" in choose_places(AUTO, SHAPE, SHARED).reason
    assert AUTO.links_on("cpu") == default_links("cpu") == PRESETS["loopback"]
    assert AUTO.links_on("cuda") == PRESETS["nvlink-400g"]
    assert replace(AUTO, links=SHARED).links_on("cpu") == SHARED


def test_a_gather_that_hides_behind_the_key_projection_costs_nothing() -> None:
    few = replace(SHAPE, query_rows=1024, cp_size=8)
    slow = replace(PRESETS["pcie-ethernet"], dense_flops=50e12)
    seconds = place_seconds(AUTO, few, slow)
    assert seconds["q"] == 0
    assert seconds["heads"] > 0
    assert choose_places(AUTO, few, slow).gather == "q"
    projected = replace(few, hidden_size=0)  # given projected tensors, nothing hides it
    assert place_seconds(AUTO, projected, slow)["q"] > 0


def test_what_the_user_says_is_done() -> None:
    fixed = SplitKVOptions(gather="q", scatter="proj")
    assert choose_places(fixed, replace(SHAPE, hidden_size=5120), SHARED).scatter == "proj"
    asked = choose_places(fixed, SHAPE, SHARED)
    assert asked.gather == "q"
    assert "gathers q (as asked) and scatters proj (as asked)" in asked.reason
    assert choose_places(SplitKVOptions(save="own"), SHAPE, SHARED).gather == "q"


@pytest.mark.parametrize(
    ("option", "place"),
    [(SplitKVOptions(fp32_reduce=True), "heads"), (SplitKVOptions(save="own"), "q")],
)
def test_options_that_send_more_cost_more(option: SplitKVOptions, place: str) -> None:
    assert place_seconds(option, SHAPE, SHARED)[place] > place_seconds(AUTO, SHAPE, SHARED)[place]


def test_returns_of_two_levels_by_hand() -> None:
    """8 nodes of 8: n R (g - 1) rows over links inside, R (n - 1) through the cards."""
    assert (node_ranks(SHARED, 64), node_ranks(SHARED, 8), node_ranks(SHARED, 20)) == (8, 1, 1)
    assert node_ranks(replace(SHARED, ranks_per_node=1), 64) == 1
    free = replace(SHARED, intra_latency=0.0, inter_latency=0.0, dense_flops=1e30)
    width, rows = 16 * 256, 32768 // 64

    def returned(nbytes: float) -> float:
        inside, between = 8 * 7 * rows * nbytes, 7 * rows * nbytes
        return inside / free.intra_bandwidth + between / free.inter_bandwidth

    lse_and_out = returned(16 * 4) + returned(width * 2)
    casts = free.all_gather_seconds(32768 * width * 2, 64)
    casts += free.all_gather_seconds(32768 * 16 * 2 * 4, 64)
    seconds = place_seconds(AUTO, SHAPE, free)
    assert seconds["heads"] == pytest.approx(lse_and_out + casts)
    gathered = free.all_gather_seconds(32768 * width * 2, 64)
    assert seconds["q"] == pytest.approx(gathered + returned(width * 2))  # nothing hides them
    wide = place_seconds(SplitKVOptions(fp32_reduce=True), SHAPE, free)
    assert wide["q"] - seconds["q"] == pytest.approx(returned(width * 2))
    assert place_seconds(SplitKVOptions(ranks_per_node=1), SHAPE, free)["heads"] > seconds["heads"]


def test_levels_and_nodes_are_those_of_the_run() -> None:
    """A shape that knows its run overrules what links say of another launch."""
    measured = replace(SHARED, ranks_per_node=64)  # in a launch on one node, with the same cards
    there = replace(SHAPE, node_ranks=8)
    assert place_seconds(AUTO, there, measured) == place_seconds(
        AUTO, there, replace(measured, ranks_per_node=8)
    )
    assert place_seconds(AUTO, SHAPE, measured) != place_seconds(AUTO, there, measured)
    one_level = replace(SHAPE, node_ranks=1)
    assert place_seconds(AUTO, one_level, SHARED) == place_seconds(
        SplitKVOptions(ranks_per_node=1), SHAPE, SHARED
    )
    assert place_seconds(AUTO, one_level, SHARED) != place_seconds(AUTO, there, SHARED)


def test_the_latencies_of_two_levels() -> None:
    nothing = [Move("out", f"all_to_all_{level}", 0, 2) for level in ("inside", "between")]
    latencies = [move_seconds(move, SHARED, 64) for move in nothing]
    assert latencies == [7 * SHARED.intra_latency, 7 * SHARED.inter_latency]
