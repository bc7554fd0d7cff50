"""Parts of a step by hand on a toy drafter and toy links, and bounds that no method may break."""

from dataclasses import replace

import pytest

from megatron_splitkv.attention.strategies.volumes import Move, Traffic, volume
from megatron_splitkv.comm.links import PRESETS, Links
from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale import FITTED, METHODS, Constants, step_seconds
from megatron_splitkv.scale.dense import dense_flops
from megatron_splitkv.scale.paper import MODELS
from megatron_splitkv.scale.step import call_efficiency, supports, traffic_shape
from megatron_splitkv.scale.transfers import exposed_seconds, move_seconds
from megatron_splitkv.scale.work import QueryCast, most_work, total_work
from megatron_splitkv.scale.workload import Workload, strong, weak

DRAFTER = DFlashConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=10,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=100,
    num_target_layers=6,
    target_layer_ids=(1, 3, 5),
    mask_token_id=7,
)
NODE = Links("toy", 1.0, 100.0, 10.0, 40.0, 1, 4, 1.0, 1.0)
UNIT = Constants(1.0, 1.0, 1.0, 0.5)


def test_dense_flops_by_hand() -> None:
    dense = dense_flops(
        DRAFTER,
        context_rows=1,
        key_rows=2,
        own_queries=3,
        projected_queries=4,
        projected_outputs=5,
    )
    assert dense.features == 2 * 2 * 1 * 24 * 8
    assert dense.keys == 2 * 3 * 2 * 2 * 8 * 16
    assert dense.queries == 2 * 3 * 2 * 4 * 8 * 32
    assert dense.outputs == 2 * 3 * 2 * 5 * 32 * 8
    assert dense.feed_forward == 2 * 3 * 2 * 3 * 3 * 8 * 10
    assert dense.head == 2 * 2 * 3 * 8 * 100
    parts = (dense.features, dense.keys, dense.queries, dense.outputs, dense.feed_forward)
    assert dense.total == sum(parts) + dense.head


@pytest.mark.parametrize(
    ("move", "seconds"),
    [
        (Move("q", "all_gather", 300, 2), NODE.all_gather_seconds(800, 4)),
        (Move("k", "all_gather_v", 300, 2), NODE.all_gather_seconds(800, 4)),
        (Move("y", "reduce_scatter", 300, 2), NODE.reduce_scatter_seconds(800, 4)),
        (Move("q", "all_to_all", 300, 2), NODE.all_to_all_seconds(800, 4)),
        (Move("l", "all_reduce", 600, 4, 2), 2 * NODE.all_reduce_seconds(800, 4)),
        (Move("l", "all_reduce_max", 300, 4), NODE.all_reduce_seconds(800, 4)),
        (Move("kv", "broadcast", 300, 2, 4), 4 * NODE.broadcast_seconds(200, 4)),
        (Move("kv", "reduce_sum", 300, 2, 4), 4 * NODE.broadcast_seconds(200, 4)),
        # Three hops of 200 bytes, each 1 + 2 s and 0.5 s a byte of handling.
        (Move("k", "shift", 300, 2, 3), 3 * (1 + 2 + 100)),
    ],
)
def test_moves_by_hand(move: Move, seconds: float) -> None:
    assert move_seconds(move, NODE, 4, 0.5) == pytest.approx(seconds)


def test_a_return_of_two_levels_hides_as_one() -> None:
    moves = tuple(Move("grad_q", f"all_to_all_{level}", 8, 2) for level in ("inside", "between"))
    traffic = Traffic((Move("grad_out", "all_gather", 8, 2), *moves))
    assert exposed_seconds(traffic, [1.0, 2.0, 3.0], "grad_q", 4.0) == 1 + (2 + 3 - 4)
    assert exposed_seconds(traffic, [1.0, 2.0, 3.0], "grad_q", 9.0) == 1
    assert exposed_seconds(traffic, [1.0, 2.0, 3.0], "", 9.0) == 6


def test_ours_come_near_a_reduce_scatter_between_nodes() -> None:
    """Sums on the way: what leaves a node is what a reduce-scatter sends."""
    links, workload = FITTED.on(PRESETS["nvlink-400g-shared"]), strong(64)
    for model in MODELS:
        drafter = DFlashConfig.preset(model)
        ours = METHODS["splitkv-q-heads"]
        reduced = replace(ours, published=True)
        two, one, ring = (
            step_seconds(method, workload, drafter, machine, FITTED).communication
            for method, machine in (
                (ours, links),
                # No two ranks share links or a node, with the same share of the cards.
                (ours, replace(links, ranks_per_node=1, nic_bandwidth=links.inter_bandwidth)),
                (reduced, links),
            )
        )
        assert two == pytest.approx(ring, rel=0.05)
        assert one > 1.5 * two


def test_a_group_cast_splits_its_bytes_between_levels() -> None:
    move, cast = Move("q", "all_to_all_v", 400, 2), QueryCast(0, 30, 10)
    assert move_seconds(move, NODE, 8, 0.0, cast) == NODE.all_to_all_v_seconds(600, 200, 8)
    nothing = Move("q", "all_to_all_v", 0, 2)
    assert move_seconds(nothing, NODE, 8, 0.0, QueryCast(0, 0, 0)) == NODE.all_to_all_v_seconds(
        0, 0, 8
    )


def test_kernel_efficiency_by_hand() -> None:
    assert call_efficiency(128 * 128, 1 << 20, 32) == 1
    assert call_efficiency(192, 1 << 20, 64) == 0.75  # two tiles of which one is half empty
    assert call_efficiency(16, 1 << 20, 32) == (16 / 128) * (32 / 128)
    assert call_efficiency(1 << 14, 64, 32) == 0.5
    assert call_efficiency(512, 4096, 32) > call_efficiency(511, 4096, 32)


def test_attention_of_one_rank_is_its_pairs() -> None:
    """No launch, whole tiles: 3.5 x 4 operations a pair, head and width, in every layer."""
    workload = Workload(1, 8192, 4096, 1)
    fast = replace(NODE, dense_flops=1e30, attention_flops=1e6)
    step = step_seconds(METHODS["splitkv-q-heads"], workload, DRAFTER, fast, UNIT)
    occupied = (4096 / 128) * 8 / 128
    expected = 2 * 3.5 * 4 * 8 * 4 * total_work(workload) / 1e6 / min(1, occupied)
    assert step.attention == pytest.approx(expected, rel=1e-6)
    assert step.communication == step.parameters == step.redistribution == 0


def test_ulysses_is_balanced_and_split_kv_waits_for_the_busiest() -> None:
    workload, drafter = strong(8), DFlashConfig.preset(MODELS[0])
    links = FITTED.on(PRESETS["nvlink-400g"])
    ulysses = step_seconds(METHODS["a2a"], workload, drafter, links, FITTED).attention
    own = step_seconds(METHODS["splitkv"], workload, drafter, links, FITTED).attention
    imbalance = most_work(workload, "lpt") * 8 / total_work(workload)
    assert own / ulysses == pytest.approx(imbalance, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_no_method_beats_its_bytes(name: str, model: str, ranks: int) -> None:
    """What is sent, less what may hide behind the projections, at the speed of the best link."""
    method, drafter = METHODS[name], DFlashConfig.preset(model)
    if not supports(method, drafter, ranks) or method.group_cast:
        return
    links = FITTED.on(PRESETS["nvlink-400g"])
    workload = weak(ranks)
    step = step_seconds(method, workload, drafter, links, FITTED)
    moved = volume(
        method.strategy, traffic_shape(method, workload, drafter), published=method.published
    )
    nbytes = moved.bytes
    if method.strategy == "splitkv":
        for traffic, label in (
            (moved.forward, method.gather),
            (moved.backward, f"grad_{method.gather}"),
        ):
            nbytes -= sum(m.elements * m.itemsize for m in traffic.moves if m.label == label)
    fastest = max(links.intra_bandwidth, links.node_bandwidth)
    assert step.communication >= drafter.num_layers * nbytes / fastest


def test_the_first_gather_hides_and_the_rest_does_not() -> None:
    """Endless projections hide the gather and the last scatter only."""
    workload = weak(16)
    drafter = DFlashConfig.preset(MODELS[1])
    links = FITTED.on(PRESETS["nvlink-400g-shared"])
    slow = replace(links, dense_flops=1e9)
    hidden = step_seconds(METHODS["splitkv"], workload, drafter, slow, FITTED).communication
    moved = volume("splitkv", traffic_shape(METHODS["splitkv"], workload, drafter), published=True)
    left = [
        move_seconds(move, links, 16, 0.0)
        for traffic in (moved.forward, moved.backward)
        for move in traffic.moves
        if move.label not in ("q", "grad_q")
    ]
    assert hidden == pytest.approx(drafter.num_layers * sum(left))


def test_redistribution_and_parameters_by_hand() -> None:
    workload, drafter = strong(16), DFlashConfig.preset(MODELS[0])
    links = FITTED.on(PRESETS["nvlink-400g-shared"])
    paper = step_seconds(METHODS["splitkv"], workload, drafter, links, FITTED)
    rows = workload.context_rows // 16
    assert paper.redistribution == 2 * links.all_to_all_seconds(rows * 2048 * 2, 16)
    weights = 2 * 473_995_264
    assert paper.parameters == pytest.approx(3 * links.all_gather_seconds(weights, 16), rel=0.4)
    assert paper.parameters == 2 * links.all_gather_seconds(
        weights, 16
    ) + links.reduce_scatter_seconds(2 * weights, 16)
    ours = step_seconds(METHODS["splitkv-q-heads"], workload, drafter, links, FITTED)
    assert ours.redistribution == 0
    assert ours.dense < paper.dense  # outputs are not projected by every rank


def test_split_kv_does_not_grow_with_the_context_and_rings_do() -> None:
    drafter = DFlashConfig.preset(MODELS[0])
    links = FITTED.on(PRESETS["nvlink-400g-shared"])

    def communication(name: str, context: int) -> float:
        workload = Workload(8, context, 8192, 32)
        return step_seconds(METHODS[name], workload, drafter, links, FITTED).communication

    for name in ("splitkv-q-heads", "lv_xattn"):
        short, long = communication(name, 1 << 15), communication(name, 1 << 18)
        assert long == pytest.approx(short, rel=0.25), name
        assert long <= short  # longer projections hide more
    for name in ("a2a", "p2p", "ringx", "all_gather"):
        assert communication(name, 1 << 18) > 3 * communication(name, 1 << 15), name


def test_ulysses_limit_is_one_line() -> None:
    with pytest.raises(ConfigError, match="P = 64: P must divide the 32 query heads") as error:
        step_seconds(
            METHODS["a2a"], weak(64), DFlashConfig.preset(MODELS[0]), PRESETS["loopback"], FITTED
        )
    assert "\n" not in str(error.value)
