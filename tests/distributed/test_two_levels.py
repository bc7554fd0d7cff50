"""Partial results that are added up inside nodes before they leave them: the same attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions, routing
from megatron_splitkv.attention.strategies import LAYER_LABELS, splitkv
from megatron_splitkv.attention.strategies.volumes import volume
from megatron_splitkv.comm import CommMeter, RowExchange, row_exchange
from megatron_splitkv.config import ConfigError
from megatron_splitkv.testing import gloo_pool, relative_error, subgroup
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    attend_sharded,
    solve,
)
from tests.distributed.test_accuracy import PROBLEM as EVEN  # 24 blocks: any grid divides them
from tests.distributed.test_strategies_traffic import in_order, joined, shape_of

# (P, ranks a node)
GRIDS = ((4, 2), (6, 3), (6, 2), (8, 4), (8, 2))
GQA = replace(EVEN, num_key_heads=2, strategy="balanced")
# One block at the front of a contiguous split: most ranks see nothing, most blocks are padding.
LONELY = Problem(
    document_lengths=(64, 3), anchors=((10,), (None,)), strategy="none", chunks_per_rank=1
)
# Shards of unequal, and some of no rows; padding blocks appended to fill the ranks.
UNEVEN = Problem(
    document_lengths=(7, 5),
    anchors=((1, 6), (4, None, 3)),
    strategy="none",
    chunks_per_rank=1,
    tail_rows=2,
)
CASES = {
    "gqa": GQA,
    "window": replace(GQA, window=9),
    "lonely": LONELY,
    "uneven": UNEVEN,
    "strided": replace(UNEVEN, strided=True),
}
OPTIONS = (
    SplitKVOptions(query_cast="all"),
    SplitKVOptions(query_cast="all", save="own", fp32_reduce=True),
)


def _on(problem: Problem, per_node: int) -> Problem:
    return replace(problem, options=replace(problem.options, ranks_per_node=per_node))


def _solve_all(cases: Sequence[tuple[Problem, int]]) -> list[Any]:
    return [solve(*case) for case in cases]


def errors(
    cases: Sequence[tuple[Problem, int]], run: Callable[..., Any] = _solve_all, *arguments: Any
) -> list[dict[str, float]]:
    """Relative errors of each case's results against fp64 truth."""
    shares = gloo_pool(8).run(run, cases, *arguments)
    found = []
    for i, (problem, cp_size) in enumerate(cases):
        plan = problem.plan(cp_size)
        mine = assemble(plan, [shares[rank][i] for rank in range(cp_size)])
        truth = attend_global(problem, plan, problem.tensors(plan))
        assert all(torch.isfinite(x).all() for x in mine)
        found.append({n: relative_error(a, b) for n, a, b in zip(NAMES, mine, truth, strict=True)})
    return found


@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_one_process(name: str) -> None:
    cases = [
        (_on(replace(CASES[name], options=options), per_node), cp_size)
        for (cp_size, per_node), options in product(GRIDS, OPTIONS)
    ]
    for case, error in zip(cases, errors(cases), strict=True):
        assert max(error.values()) <= 1e-12, (case, error)


@pytest.mark.parametrize("fp32_reduce", [False, True])
def test_low_precision_stays_within_the_bound(fp32_reduce: bool) -> None:
    options = SplitKVOptions(query_cast="all", fp32_reduce=fp32_reduce)
    for dtype in (torch.float32, torch.bfloat16):
        problem = replace(GQA, dtype=dtype, options=options)
        plan = problem.plan(1)
        tensors = problem.tensors(plan)
        truth, dense = (attend_global(problem, plan, tensors, dense=d) for d in (False, True))
        bounds = {n: 2 * relative_error(a, b) for n, a, b in zip(NAMES, dense, truth, strict=True)}
        for error in errors([(_on(problem, per_node), p) for p, per_node in GRIDS]):
            for name, value in error.items():
                assert value <= (1.5e-6 if dtype == torch.float32 else bounds[name]), (dtype, name)


def test_large_scores() -> None:
    problem = replace(GQA, dtype=torch.bfloat16, score_scale=45.0, options=OPTIONS[0])
    plan = problem.plan(1)
    tensors = problem.tensors(plan)
    truth, dense = (attend_global(problem, plan, tensors, dense=d) for d in (False, True))
    for error in errors([(_on(problem, 4), 8), (_on(problem, 2), 6)]):
        for name, a, b in zip(NAMES, dense, truth, strict=True):
            assert error[name] <= 2 * relative_error(a, b), name


# Wrong variants


@contextmanager
def wrong_order() -> Iterator[None]:
    """Rows leave for the ranks of the node as they lie, not by the places of their owners."""

    def packed(self: Any, attended: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        return attended if dtype is None else attended.to(dtype)

    with mock.patch.object(row_exchange._InsideNode, "packed", packed):
        yield


@contextmanager
def without_weights() -> Iterator[None]:
    """Between nodes outputs are added as if each node's softmax were the whole."""
    right = splitkv.merge_contributions

    def merge(exchange: RowExchange, outs: torch.Tensor, lses: torch.Tensor) -> Any:
        out, lse = right(exchange, outs, lses)
        if isinstance(exchange, row_exchange._BetweenNodes):
            out = exchange.sum(outs, lses.dtype)
        return out, lse

    with mock.patch.object(splitkv, "merge_contributions", merge):
        yield


@contextmanager
def without_own_node() -> Iterator[None]:
    """What the own node added up does not count."""

    def total(self: Any, contributions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parts = list(contributions.split(self.own_rows))
        del parts[self._peers.index(self.group.rank())]
        return torch.stack(parts).sum(dim=0, dtype=dtype)

    with mock.patch.object(row_exchange._BetweenNodes, "sum", total):
        yield


@contextmanager
def one_level_short() -> Iterator[None]:
    """The first node's sums, kept instead of sent on."""

    def total(self: Any, contributions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return contributions[: self.own_rows].to(dtype)

    with mock.patch.object(row_exchange._BetweenNodes, "sum", total):
        yield


FAULTS = {f.__name__: f for f in (wrong_order, without_weights, without_own_node, one_level_short)}


def _solve_wrongly(cases: Sequence[tuple[Problem, int]], fault: str) -> list[Any]:
    with FAULTS[fault]():
        return _solve_all(cases)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str) -> None:
    cases = [(_on(replace(GQA, options=OPTIONS[0]), per_node), p) for p, per_node in GRIDS]
    for error in errors(cases, _solve_wrongly, fault):
        assert max(error["out"], error["grad_q"]) > 1e-2, fault


# What travels


def _measure(cases: Sequence[tuple[Problem, int]]) -> list[Any]:
    found = []
    for problem, cp_size in cases:
        group = subgroup(range(cp_size))
        if dist.get_rank() >= cp_size:
            found.append(None)
            continue
        plan = problem.plan(cp_size)
        with CommMeter() as meter:
            attend_sharded(problem, plan, problem.tensors(plan), group)
        found.append([(r.op, r.label, r.elements, r.dtype) for r in meter.records])
    return found


@pytest.mark.parametrize("fp32_reduce", [False, True])
def test_what_each_level_moves(fp32_reduce: bool) -> None:
    """Rows a rank: n R (g - 1) inside its node, R (n - 1) between nodes; one level R (P - 1)."""
    options = SplitKVOptions(query_cast="all", fp32_reduce=fp32_reduce)
    problem = replace(GQA, dtype=torch.bfloat16, options=options)
    wire = torch.float32 if fp32_reduce else torch.bfloat16
    cases = [(_on(problem, per_node), p) for p, per_node in GRIDS]
    answers = gloo_pool(8).run(_measure, cases)
    for i, (p, g) in enumerate(GRIDS):
        rows, n = problem.plan(p).num_blocks * problem.block_size // p, p // g
        stats = rows * problem.num_heads
        width = stats * problem.head_width

        def returned(
            label: str, elements: int, dtype: torch.dtype, n: int = n, g: int = g
        ) -> list[tuple[str, str, float, torch.dtype]]:
            return [
                ("all_to_all_inside", label, n * (g - 1) * elements, dtype),
                ("all_to_all_between", label, (n - 1) * elements, dtype),
            ]

        lses, outs = (
            returned("lse", stats, torch.float32),
            returned("out", width, wire),
        )
        expected = [
            ("all_gather", "q", (p - 1) * width, torch.bfloat16),
            *(record for level in zip(lses, outs, strict=True) for record in level),
            ("all_gather", "lse_and_delta", (p - 1) * 2 * stats, torch.float32),
            ("all_gather", "grad_out", (p - 1) * width, torch.bfloat16),
            *returned("grad_q", width, wire),
        ]
        for answer in answers[:p]:
            assert answer[i] == expected, (p, g)
        assert {record[1] for record in expected} <= LAYER_LABELS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_meter_equals_the_formula(dtype: torch.dtype) -> None:
    problem = replace(GQA, dtype=dtype, options=OPTIONS[0])
    cases = [(_on(problem, per_node), p) for p, per_node in GRIDS]
    answers = gloo_pool(8).run(_measure, cases)
    for i, (p, g) in enumerate(GRIDS):
        shape = replace(shape_of(problem, p), node_ranks=g)
        moved = volume("splitkv", shape)
        moves = in_order(moved.forward) + in_order(moved.backward)
        moves.sort(key=lambda move: (move.label, move.op))
        for answer in answers[:p]:
            assert sorted(joined(answer[i]), key=lambda move: (move.label, move.op)) == moves
        one = volume("splitkv", shape_of(problem, p))
        far = sum(m.elements for m in moved.forward.moves if m.op.endswith("between"))
        sent = sum(m.elements for m in one.forward.moves if m.label in ("lse", "out"))
        assert far == pytest.approx(sent * (p / g - 1) / (p - 1))  # of R (P - 1) rows


def test_a_group_cast_returns_by_one_level() -> None:
    problem = replace(GQA, options=SplitKVOptions(query_cast="group"))
    one, two = ((_on(problem, per_node), 8) for per_node in (1, 4))
    answers = gloo_pool(8).run(_measure, [one, two])
    for by_one, by_two in answers:
        assert by_one == by_two
        assert {op for op, *_ in by_one} == {"all_to_all_v"}


def _default_exchange() -> list[int] | None:
    group = subgroup(range(4))
    if dist.get_rank() >= 4:
        return None
    plan = GQA.plan(4)
    device, counts = torch.device("cpu"), []
    for per_node in (None, 2, 1, 4):
        counts.append(len(routing.row_exchange(plan, group, device, "all", None, per_node).levels))
    return counts


def test_one_level_unless_nodes_hold_several_ranks() -> None:
    for counts in gloo_pool(8).run(_default_exchange)[:4]:
        assert counts == [1, 2, 1, 1]


def test_a_node_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--splitkv-ranks-per-node 0 must be at least 1"):
        SplitKVOptions(ranks_per_node=0)
    with pytest.raises(ConfigError, match="--splitkv-ranks-per-node 4 means nothing for"):
        SplitKVOptions(ranks_per_node=4).check_strategy("p2p")
