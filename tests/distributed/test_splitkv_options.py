"""Every way in which split-KV may communicate gives the same attention: outputs and gradients."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import (
    SplitKVOptions,
    context_parallel_attention,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.kernels import cpu
from megatron_splitkv.attention.routing import row_exchange
from megatron_splitkv.attention.strategies import SplitKVAttention
from megatron_splitkv.comm import CommMeter, Routes, RowExchange
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import QueryCast, build_plan
from megatron_splitkv.testing import gloo_pool, relative_error, subgroup
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    own_slice,
    shard_keys,
    solve,
)
from tests.distributed.test_attention_equality import DEEP, MIXED

OPTIONS = {
    "group": SplitKVOptions(query_cast="group"),
    "own": SplitKVOptions(query_cast="all", save="own"),
    "group-own": SplitKVOptions(query_cast="group", save="own"),
    "fp32-wire": SplitKVOptions(query_cast="group", fp32_reduce=True),
}
# Documents that only some ranks hold; blocks on ranks without their keys; overlapping anchors.
LOCAL = replace(MIXED, strategy="balanced-local", chunks_per_rank=2)
APART = Problem(
    document_lengths=(50, 50, 20, 9),
    anchors=((49, 44, 40, 33, 3), (49, 48, 47), (19, None, 0), (8,)),
    strategy="none",
    chunks_per_rank=1,
)
PROBLEMS = {"mixed": MIXED, "deep": DEEP, "local": LOCAL, "apart": APART}


def _solve_all(problems: list[Problem], cp_sizes: tuple[int, ...]) -> list[Any]:
    return [solve(p, cp_size) for p in problems for cp_size in cp_sizes]


def _errors(problems: list[Problem], cp_sizes: tuple[int, ...], ranks: int) -> dict[str, float]:
    """Largest relative error of each problem, cp size and result against fp64 truth."""
    shares = gloo_pool(ranks).run(_solve_all, problems, cp_sizes)
    errors, i = {}, 0
    for number, problem in enumerate(problems):
        for cp_size in cp_sizes:
            plan = problem.plan(cp_size)
            found = assemble(plan, [shares[rank][i] for rank in range(cp_size)])
            expected = attend_global(problem, plan, problem.tensors(plan))
            for name, a, b in zip(NAMES, found, expected, strict=True):
                errors[f"{number} cp {cp_size} {name}"] = relative_error(a, b)
            i += 1
    return errors


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_fp64_equals_one_process(name: str, options: SplitKVOptions) -> None:
    problem = replace(PROBLEMS[name], options=options)
    errors = _errors([problem], (1, 2, 3, 4), 4)
    assert max(errors.values()) <= 1e-12, errors


def test_eight_ranks_all_options_and_head_groupings() -> None:
    problems = [
        replace(PROBLEMS[name], options=options, num_heads=6, num_key_heads=heads)
        for name, options, heads in zip(
            ("mixed", "apart", "local", "deep"), OPTIONS.values(), (1, 2, 3, 6), strict=True
        )
    ]
    errors = _errors(problems, (8,), 8)
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_low_precision_stays_within_the_bound(options: SplitKVOptions, dtype: torch.dtype) -> None:
    problem = replace(LOCAL, options=options, dtype=dtype)
    plan = problem.plan(3)
    truth = attend_global(problem, plan, problem.tensors(plan))
    dense = attend_global(problem, plan, problem.tensors(plan), dense=True)
    for name, error in _errors([problem], (3,), 4).items():
        i = NAMES.index(name.split()[-1])
        bound = 1.5e-6 if dtype == torch.float32 else 2 * relative_error(dense[i], truth[i])
        assert error <= bound, name


def test_fp32_on_the_wire_is_more_exact_and_moves_twice_the_bytes() -> None:
    errors = []
    for fp32_reduce in (False, True):
        options = SplitKVOptions(query_cast="all", fp32_reduce=fp32_reduce)
        problem = replace(DEEP, dtype=torch.bfloat16, options=options, strategy="balanced")
        errors.append(_errors([problem], (4,), 4))
    for result in ("out", "grad_q"):
        rounded, exact = (e[f"0 cp 4 {result}"] for e in errors)
        assert exact < rounded, result


# Wrong variants


def _without_one_contribution(self: Any, contributions: torch.Tensor, dtype: Any) -> torch.Tensor:
    parts = list(self.parts(contributions))
    total = contributions.new_zeros((self.own_rows, *contributions.shape[1:]), dtype=dtype)
    for rows, part in parts[:-1]:
        total.index_add_(0, torch.arange(self.own_rows) if rows is None else rows, part.to(dtype))
    return total


def _solve_wrongly(problem: Problem, cp_size: int) -> Any:
    right = RowExchange.sum
    RowExchange.sum = _without_one_contribution  # type: ignore[method-assign]
    try:
        return solve(problem, cp_size)
    finally:
        RowExchange.sum = right  # type: ignore[method-assign]


def test_a_lost_contribution_is_seen() -> None:
    problem = replace(LOCAL, options=OPTIONS["group"])
    plan = problem.plan(4)
    found = assemble(plan, gloo_pool(4).run(_solve_wrongly, problem, 4))
    expected = attend_global(problem, plan, problem.tensors(plan))
    assert relative_error(found[1], expected[1]) > 1e-2


def _sums_in_bf16(self: Any, contributions: torch.Tensor, dtype: Any) -> torch.Tensor:
    total = contributions.new_zeros((self.own_rows, *contributions.shape[1:]))
    for rows, part in self.parts(contributions):
        total.index_add_(0, torch.arange(self.own_rows) if rows is None else rows, part)
    return total.to(dtype)


def _errors_of_sums(problem: Problem, cp_size: int) -> list[Any]:
    right = RowExchange.sum
    shares = [solve(problem, cp_size)]
    RowExchange.sum = _sums_in_bf16  # type: ignore[method-assign]
    try:
        return [*shares, solve(problem, cp_size)]
    finally:
        RowExchange.sum = right  # type: ignore[method-assign]


def test_query_gradients_add_up_in_fp32_over_groups() -> None:
    problem = replace(DEEP, dtype=torch.bfloat16, strategy="balanced", options=OPTIONS["group"])
    plan = problem.plan(8)
    expected = attend_global(problem, plan, problem.tensors(plan))[1]
    shares = gloo_pool(8).run(_errors_of_sums, problem, 8)
    right, wrong = (
        relative_error(assemble(plan, [share[i] for share in shares])[1], expected)
        for i in range(2)
    )
    assert right < 0.8 * wrong


def test_own_queries_that_were_written_over_are_refused() -> None:
    layout = BlockLayout([3], [0], [True], 2)
    leaf, k = torch.randn(2, 1, 4, requires_grad=True), torch.randn(8, 1, 4)
    plan = build_plan(layout, 8, 1)
    for save in ("gathered", "own"):
        q = leaf * 1
        out = split_context_parallel_attention(
            q, k, k, k[:2], k[:2], plan, None, options=SplitKVOptions(save=save)
        )
        q.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_frozen_queries_send_no_gradient() -> None:
    for records in gloo_pool(4).run(_labels_without_query_gradient, APART)[:3]:
        assert "grad_out" in records
        assert "grad_q" not in records


def _labels_without_query_gradient(problem: Problem) -> list[str] | None:
    group, rank = subgroup(range(3)), dist.get_rank()
    if rank >= 3:
        return None
    plan = problem.plan(3)
    q, k, v, _ = problem.tensors(plan)
    keys = [shard_keys(x, plan, rank).requires_grad_() for x in (k, v)]
    with CommMeter() as meter:
        out = context_parallel_attention(q[own_slice(plan, rank)], *keys, plan, group)
        out.sum().backward()
    return [record.label for record in meter.records]


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
def test_autocast_changes_nothing(kernel: str) -> None:
    problem = replace(MIXED, dtype=torch.float32, kernel=kernel)
    plan = problem.plan(1)
    q, k, v, _ = problem.tensors(plan)
    plain = context_parallel_attention(q, k, v, plan, None, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(context_parallel_attention(q, k, v, plan, None, kernel=kernel), plain)


# The data of a cast


def test_the_busiest_rank_decides_the_cast() -> None:
    # Rank 0 holds keys of all blocks, the others' own documents are theirs alone.
    needs = np.zeros((4, 8), dtype=bool)
    needs[0] = True
    plan = Problem(document_lengths=(64,), anchors=((9,) * 8,)).plan(4)
    with mock.patch.object(type(plan), "needs", return_value=needs):
        assert plan.resolve_cast("auto") == "all"


def test_casts_of_one_plan_are_kept_apart() -> None:
    plan = replace(LOCAL, strategy="none").plan(2)
    device = torch.device("cpu")
    group = mock.Mock(size=lambda: 2, rank=lambda: 1)
    every, some = (row_exchange(plan, group, device, cast, None) for cast in ("all", "group"))
    assert every.routes is None
    assert some.routes is not None
    assert row_exchange(plan, group, device, "all", None) is every


@pytest.mark.parametrize("strategy", ["none", "zigzag", "balanced", "balanced-local"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_casts_of_all_ranks_fit_together(strategy: str, cp_size: int) -> None:
    plan = replace(APART, strategy=strategy).plan(cp_size)
    casts = [QueryCast.of_needs(rank, plan.needs()) for rank in range(cp_size)]
    for rank, cast in enumerate(casts):
        start, end = plan.key_ranges(rank)
        own = set(plan.blocks(rank))
        assert cast.blocks.tolist() == sorted(set((start < end).nonzero()[0]) | own)
        assert cast.blocks[cast.own].tolist() == plan.blocks(rank).tolist()
        for other in range(cp_size):
            sent = casts[other].sent[rank] + plan.blocks(other)[:1]
            owners = cast.blocks // plan.blocks_per_rank
            assert cast.blocks[owners == other].tolist() == sent.tolist()
            assert cast.received[other] == sent.size


def _exchange_of_three() -> list[torch.Tensor] | None:
    group, rank = subgroup(range(3)), dist.get_rank()
    if rank >= 3:
        return None
    # Rank 0 attends everything, the others only their own two rows.
    own = torch.arange(2)
    sent = [own, own[:0], own[:0]]
    sent[rank] = own
    received = [2, 2, 2] if rank == 0 else [2 * (r == rank) for r in range(3)]
    exchange = RowExchange(
        group,
        2,
        Routes(
            torch.cat(sent),
            [s.numel() for s in sent],
            received,
            torch.arange(6) if rank == 0 else own + 2 * rank,
        ),
    )
    rows = torch.tensor([10.0, 11.0]) + 10 * rank
    attended = exchange.launch_cast(rows, label="x").wait()
    back = exchange.launch_return(attended + 0.5 * rank, label="x").wait()
    return [attended, exchange.sum(back, torch.float64), exchange.total(attended, label="y")]


def test_values_of_an_uneven_exchange() -> None:
    first, second, third = gloo_pool(4).run(_exchange_of_three)[:3]
    assert first[0].tolist() == [10, 11, 20, 21, 30, 31]
    assert second[0].tolist() == [20, 21]
    assert first[1].tolist() == [10, 11]
    assert second[1].tolist() == [40.5, 42.5]
    assert third[1].tolist() == [61, 63]
    assert third[1].dtype == torch.float64
    assert first[2].tolist() == [10, 11, 40, 42, 60, 62]
    assert third[2].tolist() == [60, 62]


# Refusals


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"gather": "k"}, "--splitkv-gather 'k' is not known; choose one of: auto, q, hidden"),
        ({"scatter": "x"}, "--splitkv-scatter 'x' is not known; choose one of: auto, heads, proj"),
        ({"query_cast": "x"}, "--splitkv-query-cast 'x' is not known"),
        ({"save": "x"}, "--splitkv-save 'x' is not known; choose one of: gathered, own"),
        ({"save": "own", "gather": "hidden"}, "use it with --splitkv-gather q"),
    ],
)
def test_unknown_options_name_the_allowed(choice: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SplitKVOptions(**choice)


def test_steps_refuse_what_is_not_of_their_plan_before_anything_travels() -> None:
    plan, cpu_device = LOCAL.plan(2), torch.device("cpu")
    with pytest.raises(ConfigError, match="plan is for 2 context-parallel ranks, the group has 1"):
        SplitKVAttention(plan, None, cpu_device, kernel=cpu, softmax_scale=1.0)
    attention = SplitKVAttention(LOCAL.plan(1), None, cpu_device, kernel=cpu, softmax_scale=1.0)
    rows = attention.exchange.own_rows
    with pytest.raises(ConfigError, match=f"hidden has {rows + 1} rows, the plan gives rank 0"):
        attention.launch(torch.zeros(rows + 1, 4), label="hidden")


@pytest.mark.parametrize("choice", [{"gather": "hidden"}, {"scatter": "proj"}])
def test_places_beyond_a_projection_need_the_projection(choice: dict[str, str]) -> None:
    layout = BlockLayout([3], [0], [True], 2)
    q, k = torch.zeros(2, 1, 4), torch.zeros(8, 1, 4)
    plan = build_plan(layout, 8, 1)
    with pytest.raises(ConfigError, match="needs the projections, which attention from"):
        split_context_parallel_attention(
            q, k, k, q, q, plan, None, options=SplitKVOptions(**choice)
        )
