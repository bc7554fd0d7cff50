"""What every strategy moves: meter against formula, to the element, and formula against papers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions, context_parallel_attention
from megatron_splitkv.attention.strategies import region
from megatron_splitkv.attention.strategies.volumes import Move, Traffic, TrafficShape, volume
from megatron_splitkv.comm import CommMeter, mark
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from megatron_splitkv.testing import gloo_pool, subgroup
from tests.distributed.attention_problem import Problem, own_slice, shard_keys

PEERS = CP_COMM_TYPES[1:]
# 30 chunks of 127 rows: shards differ; blocks are padded at some group sizes.
UNEVEN = Problem(
    document_lengths=(96, 31),
    anchors=((10, 33, 50, 71, 72, 95), (5, None, 30)),
    num_heads=12,
    num_key_heads=4,
    dtype=torch.bfloat16,
    strategy="balanced",
)
EMPTY_SHARDS = replace(
    UNEVEN, document_lengths=(2,), anchors=((1,),), strategy="none", chunks_per_rank=1
)

Records = list[tuple[str, str, float, torch.dtype]]


def measure(problem: Problem, cp_size: int) -> list[Records] | None:
    """Collectives of forward and of backward."""
    group, rank = subgroup(range(cp_size)), dist.get_rank()
    if rank >= cp_size:
        return None
    plan = problem.plan(cp_size)
    q, k, v, grad_out = problem.tensors(plan)
    local = (q[own_slice(plan, rank)], shard_keys(k, plan, rank), shard_keys(v, plan, rank))
    leaves = [x.clone().requires_grad_() for x in local]
    directions = []
    with CommMeter() as meter:
        out = context_parallel_attention(
            *leaves, plan, group, strategy=problem.comm, options=problem.options
        )
        directions.append([(r.op, r.label, r.elements, r.dtype) for r in meter.records])
        meter.clear()
        out.backward(grad_out[own_slice(plan, rank)])
        directions.append([(r.op, r.label, r.elements, r.dtype) for r in meter.records])
    return directions


def measure_all(cases: list[tuple[Problem, int]]) -> list[Any]:
    return [measure(*case) for case in cases]


def measured(
    cases: list[tuple[Problem, int]], ranks: int = 4
) -> Iterator[tuple[Problem, int, int, Records, Records]]:
    """(problem, P, rank, forward, backward) of all ranks of all cases."""
    answers = gloo_pool(ranks).run(measure_all, cases)
    for i, (problem, cp_size) in enumerate(cases):
        for rank in range(cp_size):
            yield problem, cp_size, rank, *answers[rank][i]


def shape_of(problem: Problem, cp_size: int) -> TrafficShape:
    return TrafficShape.of_plan(
        problem.plan(cp_size),
        heads=problem.num_heads,
        kv_heads=problem.num_key_heads,
        head_width=problem.head_width,
        dtype=problem.dtype,
        query_cast=problem.options.query_cast,
    )


def joined(records: Records) -> list[Move]:
    """Records as moves, in the order of their labels."""
    keys = dict.fromkeys((label, op, dtype) for op, label, _, dtype in records)
    moves = []
    for label, op, dtype in keys:
        sizes = [n for o, name, n, d in records if (name, o, d) == (label, op, dtype)]
        moves.append(
            Move(label, op, pytest.approx(sum(sizes), rel=1e-12), dtype.itemsize, len(sizes))
        )
    return sorted(moves, key=lambda move: move.label)


def in_order(traffic: Traffic) -> list[Move]:
    return sorted(traffic.moves, key=lambda move: move.label)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("comm", CP_COMM_TYPES)
def test_elements_and_calls_equal_the_formula(comm: str, dtype: torch.dtype) -> None:
    options = SplitKVOptions(query_cast="all" if comm == "splitkv" else "auto")
    problems = [replace(p, comm=comm, dtype=dtype, options=options) for p in (UNEVEN, EMPTY_SHARDS)]
    assert len({UNEVEN.plan(4).num_rows(rank) for rank in range(4)}) > 1
    assert 0 in {EMPTY_SHARDS.plan(4).num_rows(rank) for rank in range(4)}
    cases = [(p, cp_size) for p in problems for cp_size in (1, 2, 4)]
    shared_heads = replace(problems[0], num_key_heads=2)
    cases += [(shared_heads, 4)]
    if comm != "a2a":  # its key heads must divide
        cases += [(p, 3) for p in problems]
    for problem, cp_size, rank, forward, backward in measured(cases):
        expected = volume(comm, shape_of(problem, cp_size), rank=rank)
        assert joined(forward) == in_order(expected.forward), (cp_size, rank)
        assert joined(backward) == in_order(expected.backward), (cp_size, rank)


def test_gathering_again_costs_one_more_gather() -> None:
    problem = replace(UNEVEN, comm="all_gather", options=replace(UNEVEN.options, save="own"))
    for _, cp_size, rank, forward, backward in measured([(problem, 3)]):
        expected = volume("all_gather", shape_of(problem, cp_size), rank=rank)
        assert joined(forward) == in_order(expected.forward)
        both = sorted(expected.forward.moves + expected.backward.moves, key=lambda m: m.label)
        assert joined(backward) == both


def test_only_rings_and_gathers_of_keys_grow_with_the_context() -> None:
    shorter = replace(UNEVEN, chunks_per_rank=1)  # queries go where keys are: one plan for both
    longer = replace(
        shorter,
        document_lengths=tuple(8 * n for n in UNEVEN.document_lengths),
        anchors=tuple(tuple(None if a is None else 8 * a for a in row) for row in UNEVEN.anchors),
    )
    cases = [(replace(p, comm=comm), 4) for comm in CP_COMM_TYPES for p in (shorter, longer)]
    sent: dict[tuple[str, bool], float] = {}
    for problem, _, _, forward, backward in measured(cases):
        key = (problem.comm, problem.context_length == longer.context_length)
        records = forward + backward
        sent[key] = sent.get(key, 0.0) + sum(n * dtype.itemsize for _, _, n, dtype in records)
    growth = {comm: sent[comm, True] / sent[comm, False] for comm in CP_COMM_TYPES}
    assert growth["splitkv"] == growth["lv_xattn"] == 1.0
    assert all(growth[comm] > 2.0 for comm in ("a2a", "p2p", "ringx", "all_gather")), growth


def test_of_a_group_cast_the_ranks_together_move_what_the_formula_says() -> None:
    grouped = Problem(
        document_lengths=(64, 64, 64, 64),
        anchors=((49, 53, 58, 63), (40, 41), (60,), (9, 63)),
        dtype=torch.bfloat16,
        strategy="none",
        options=SplitKVOptions(query_cast="group"),
    )
    expected = volume("splitkv", shape_of(grouped, 4))
    assert (
        expected.bytes < 0.5 * volume("splitkv", replace(shape_of(grouped, 4), query_share=1)).bytes
    )
    sent = dict.fromkeys(("forward", "backward"), 0.0)
    for _, _, _, *directions in measured([(grouped, 4)]):
        for name, records in zip(sent, directions, strict=True):
            sent[name] += sum(n * dtype.itemsize for _, _, n, dtype in records) / 4
    assert sent["forward"] == pytest.approx(expected.forward.bytes, rel=1e-12)
    assert sent["backward"] == pytest.approx(expected.backward.bytes, rel=1e-12)


# Formula against the papers' tables

Q, S, H, D = 4096, 65536, 32, 128


def shape(cp_size: int, kv_heads: int = H, **changes: Any) -> TrafficShape:
    return TrafficShape(Q, S, cp_size, H, kv_heads, D, **changes)


@pytest.mark.parametrize("cp_size", [2, 3, 8, 64])
def test_published_formulas(cp_size: int) -> None:
    f, width, p = (cp_size - 1) / cp_size, H * D, cp_size
    keys = 2 * (S + Q) * width
    table = {
        "splitkv": (2 * Q * width * f + 4 * Q * H * f, 2 * Q * width * f + 2 * Q * H * f),
        "a2a": (2 * width * (S + 2 * Q) / p * f,) * 2,
        "p2p": (keys * f, keys * f + keys),
        "ringx": (2 * Q * width * f + 3 * Q * H * f, 2 * keys * f),
        "lv_xattn": (
            Q * width * f + Q * width + Q * H,
            3 * Q * width * f + Q * H * f + Q * width,
        ),
        "all_gather": (keys * f, keys * f),
    }
    calls = {
        "a2a": (4, 4),
        "p2p": (2 * (p - 1), 2 * (p - 1) + 2 * p),
        "ringx": (4 * p, 2 * p),
        "lv_xattn": (3 * p - 1, 5 * p - 4),
        "all_gather": (2, 2),
    }
    for name, (forward, backward) in table.items():
        if name == "a2a" and H % cp_size:
            continue
        found = volume(name, shape(cp_size), published=True)
        if name == "a2a" and cp_size > H:
            continue
        assert found.forward.elements == pytest.approx(forward, rel=1e-12), name
        assert found.backward.elements == pytest.approx(backward, rel=1e-12), name
        if name in calls:
            assert (found.forward.calls, found.backward.calls) == calls[name], name


@pytest.mark.parametrize("cp_size", [2, 8])
def test_ours_move_what_is_published_but_for_the_own_blocks_keys(cp_size: int) -> None:
    f = (cp_size - 1) / cp_size
    own = 2 * Q * H * D
    saved = {
        "a2a": (0, 0),
        "lv_xattn": (0, 0),
        "p2p": (own * f, own * f + own),
        "ringx": (0, 2 * own * f),
        "all_gather": (own * f, own * f),
    }
    for name, (forward, backward) in saved.items():
        ours, theirs = (volume(name, shape(cp_size), published=p) for p in (False, True))
        assert theirs.forward.elements - ours.forward.elements == pytest.approx(forward), name
        assert theirs.backward.elements - ours.backward.elements == pytest.approx(backward), name
        assert theirs.forward.calls == ours.forward.calls, name
        assert theirs.backward.calls == ours.backward.calls, name


def test_ulysses_overtakes_split_kv_with_many_ranks_until_key_heads_run_out() -> None:
    """P > 1 + (S + Q) H_kv / (Q H_q), if every rank has a key head of its own."""

    def ratio(cp_size: int, kv_heads: int, heads: int = 64) -> float:
        sizes = TrafficShape(32768, 2**20, cp_size, heads, kv_heads, D)
        ours = replace(sizes, gather="q", scatter="heads")
        lse = 3 * sizes.query_rows * heads * (cp_size - 1) / cp_size * 4
        return volume("a2a", sizes).bytes / (volume("splitkv", ours).bytes - lse)

    assert ratio(32, 64) > 1 > ratio(64, 64), "of multi-head attention at P > 34"
    assert ratio(8, 16) > 1 > ratio(16, 16), "of 4 query heads a key head at P >= 10"
    # 4 key heads: from there on the keys' volume is that of a context sharded in four.
    four, many = (
        sum(m.elements for m in volume("a2a", shape(p, kv_heads=4)).forward.moves if m.label == "k")
        for p in (4, 32)
    )
    assert many / four == pytest.approx((31 / 32 * (S + Q)) / (3 / 4 * (S + Q)))


def test_an_unknown_strategy_has_no_formula() -> None:
    with pytest.raises(ConfigError, match="'ring' has no formula; choose one of: splitkv, a2a"):
        volume("ring", shape(2))


def test_one_rank_moves_nothing() -> None:
    for name in CP_COMM_TYPES:
        found = volume(name, shape(1))
        assert (found.bytes, found.forward.calls, found.forward.serial_steps) == (0, 0, 0)


# Overlap


def events(comm: str, cp_size: int) -> list[list[tuple[str, str]]] | None:
    """Launches, waits and meetings of forward and backward, in order."""
    if dist.get_rank() >= cp_size:
        subgroup(range(cp_size))
        return None
    right_attend, right_gradients = region.PeerStrategy.attend, region.PeerStrategy.gradients

    def attend(self: Any, *meeting: Any) -> Any:
        mark("meet", "")
        return right_attend(self, *meeting)

    def gradients(self: Any, *meeting: Any) -> Any:
        mark("meet", "")
        return right_gradients(self, *meeting)

    region.PeerStrategy.attend, region.PeerStrategy.gradients = attend, gradients  # type: ignore[method-assign]
    try:
        with CommMeter() as meter:
            measure(replace(UNEVEN, comm=comm), cp_size)
    finally:
        region.PeerStrategy.attend = right_attend  # type: ignore[method-assign]
        region.PeerStrategy.gradients = right_gradients  # type: ignore[method-assign]
    return meter.events


@pytest.mark.parametrize(("comm", "label"), [("p2p", "k"), ("lv_xattn", "q"), ("ringx", "kv")])
def test_what_the_next_meeting_needs_travels_during_this_one(comm: str, label: str) -> None:
    for found in gloo_pool(4).run(events, comm, 4):
        order = [event for event in found if event[1] == label or event[0] == "meet"]
        launched = [i for i, event in enumerate(order) if event == ("launch", label)]
        waited = [i for i, event in enumerate(order) if event == ("wait", label)]
        assert len(launched) == len(waited) >= 3
        first = 1 if comm == "ringx" else 0  # nothing hides the first turn
        for start, end in list(zip(launched, waited, strict=True))[first:]:
            assert ("meet", "") in order[start:end]
