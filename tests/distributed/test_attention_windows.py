"""Sliding windows over 1 to 4 ranks equal one process, whatever way the queries travel."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.comm import CommMeter
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

CP_SIZES = (1, 2, 3, 4)
WINDOWS = (2, 4, 30, 1000)
# Anchors closer than a block, equal anchors, padding blocks, documents shorter than a window.
MIXED = Problem(
    document_lengths=(90, 7, 1, 260),
    anchors=(
        (0, 3, 4, 4, 5, 40, 41, 89),
        (6, None),
        (None,),
        (*range(20, 60, 3), None, *range(100, 260, 11)),
    ),
    tail_rows=5,
    chunks_per_rank=3,
)


def _solve_windows(problem: Problem) -> list[list[torch.Tensor] | None]:
    return [solve(replace(problem, window=window), size) for size in CP_SIZES for window in WINDOWS]


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("query_cast", ["all", "group", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_one_process(dtype: torch.dtype, query_cast: str, kernel: str) -> None:
    options = SplitKVOptions(query_cast=query_cast)
    problem = replace(MIXED, dtype=dtype, kernel=kernel, options=options)
    shares = gloo_pool(4).run(_solve_windows, problem)
    bound = 1e-12 if dtype == torch.float64 else 1.5e-6
    for i, cp_size in enumerate(CP_SIZES):
        plan = problem.plan(cp_size)
        tensors = problem.tensors(plan)
        for j, window in enumerate(WINDOWS):
            found = assemble(plan, [s[i * len(WINDOWS) + j] for s in shares[:cp_size]])
            expected = attend_global(replace(problem, window=window), plan, tensors)
            for name, a, b in zip(NAMES, found, expected, strict=True):
                error = relative_error(a, b)
                assert error <= bound, f"cp {cp_size}, window {window}: {name} is off by {error}"


@pytest.mark.parametrize("num_key_heads", [6, 3, 1], ids=["mha", "gqa", "mqa"])
def test_bf16_error_is_within_twice_one_process(num_key_heads: int) -> None:
    problem = replace(
        MIXED, dtype=torch.bfloat16, window=30, num_heads=6, num_key_heads=num_key_heads
    )
    shares = gloo_pool(4).run(solve, problem, 4)
    plan = problem.plan(4)
    tensors = problem.tensors(plan)
    truth = attend_global(problem, plan, tensors)
    dense = attend_global(problem, plan, tensors, dense=True)
    for name, a, b, c in zip(NAMES, assemble(plan, shares), dense, truth, strict=True):
        assert relative_error(a, c) <= 2 * relative_error(b, c), name


def _query_elements(problem: Problem, windows: list[int | None]) -> list[float]:
    group = subgroup(range(4))
    plan = problem.plan(4)
    moved = []
    for window in windows:
        with CommMeter() as meter:
            attend_sharded(replace(problem, window=window), plan, problem.tensors(plan), group)
        moved.append(meter.elements(label="q"))
    return moved


def test_a_short_window_moves_few_queries() -> None:
    """Contiguous shards: a window of 30 of 400 reaches one rank, seldom two."""
    problem = Problem(
        document_lengths=(400,),
        anchors=(tuple(range(1, 400, 4)),),
        strategy="none",
        options=SplitKVOptions(query_cast="group"),
    )
    moved = torch.tensor(gloo_pool(4).run(_query_elements, problem, [30, None])).sum(dim=0)
    needs = problem.plan(4).needs(30)
    blocks = needs.shape[1]
    own = torch.arange(4).repeat_interleave(blocks // 4)
    away = torch.from_numpy(needs).clone()
    away[own, torch.arange(blocks)] = False
    row_elements = problem.block_size * problem.num_heads * problem.head_width
    assert moved[0] == int(away.sum()) * row_elements
    assert moved[0] < moved[1] / 5


def _refuse(problem: Problem) -> str:
    plan = problem.plan(4)
    with CommMeter() as meter, pytest.raises(ConfigError) as refusal:
        attend_sharded(problem, plan, problem.tensors(plan), dist.group.WORLD)
    assert meter.records == []
    return str(refusal.value)


@pytest.mark.parametrize("query_cast", ["all", "group"])
def test_bad_windows_are_refused_before_anything_travels(query_cast: str) -> None:
    problem = replace(MIXED, window=0, options=SplitKVOptions(query_cast=query_cast))
    for message in gloo_pool(4).run(_refuse, problem):
        assert message.startswith("window 0 must be at least 1")
