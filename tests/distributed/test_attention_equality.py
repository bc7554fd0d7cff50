"""Split-KV over 1 to 4 ranks equals one process: outputs and all gradients."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.local_attention import LocalAttention
from megatron_splitkv.attention.strategies import splitkv
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.testing import gloo_pool, relative_error
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    solve,
)

CP_SIZES = (1, 2, 3, 4)

# Odd lengths; overlapping and equal anchors; an anchor at a document's start, which sees only its
# own block; a document without anchors, one with a single candidate; padding blocks; a tail.
MIXED = Problem(
    document_lengths=(37, 7, 5, 2, 1, 68, 11),
    anchors=(
        (3, 5, 6, 6, 19, 36),
        (0, 6),
        (2, None, None),
        (None, None),
        (0,),
        (1, 9, 11, 20, 33, 34, 35, 50, 63, 67),
        (),
    ),
    tail_rows=3,
)
# One long document with enough blocks for several levels of rectangles.
DEEP = Problem(
    document_lengths=(700,),
    anchors=(tuple(range(20, 700, 9)),),
    block_size=8,
    chunks_per_rank=5,
)


def _solve_everywhere(problem: Problem, cp_sizes: tuple[int, ...]) -> list[Any]:
    return [solve(problem, cp_size) for cp_size in cp_sizes]


def _errors(problem: Problem, cp_sizes: tuple[int, ...] = CP_SIZES) -> dict[int, list[float]]:
    """Relative errors of out, grad_q, grad_k, grad_v against fp64 truth, by cp size."""
    shares = gloo_pool(4).run(_solve_everywhere, problem, cp_sizes)
    errors = {}
    for i, cp_size in enumerate(cp_sizes):
        plan = problem.plan(cp_size)
        found = assemble(plan, [shares[rank][i] for rank in range(cp_size)])
        expected = attend_global(problem, plan, problem.tensors(plan))
        assert [x.dtype for x in found] == [problem.dtype] * 4
        errors[cp_size] = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    return errors


def _assert_within(errors: dict[int, list[float]], bound: float) -> None:
    for cp_size, values in errors.items():
        for name, error in zip(NAMES, values, strict=True):
            assert error <= bound, f"cp {cp_size}: {name} is off by {error:.2e}"


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt"])
def test_fp64_equals_one_process(strategy: str, kernel: str) -> None:
    _assert_within(_errors(replace(MIXED, strategy=strategy, kernel=kernel)), 1e-12)


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("num_key_heads", [6, 3, 1])
def test_head_groupings(num_key_heads: int, kernel: str) -> None:
    problem = replace(MIXED, num_heads=6, num_key_heads=num_key_heads, kernel=kernel)
    _assert_within(_errors(problem, (1, 3)), 1e-12)


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
def test_many_levels_of_rectangles(kernel: str) -> None:
    _assert_within(_errors(replace(DEEP, kernel=kernel)), 1e-12)


@pytest.mark.parametrize("problem", [MIXED, DEEP], ids=["mixed", "deep"])
@pytest.mark.parametrize("kernel", ["naive", "cpu"])
def test_fp32_error_is_fp32_noise(problem: Problem, kernel: str) -> None:
    _assert_within(_errors(replace(problem, dtype=torch.float32, kernel=kernel)), 1.5e-6)


@pytest.mark.parametrize("problem", [MIXED, DEEP], ids=["mixed", "deep"])
@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("num_key_heads", [4, 1])
def test_bf16_error_is_within_twice_one_process(
    problem: Problem, kernel: str, num_key_heads: int
) -> None:
    problem = replace(problem, dtype=torch.bfloat16, kernel=kernel, num_key_heads=num_key_heads)
    for cp_size, values in _errors(problem).items():
        plan = problem.plan(cp_size)
        tensors = problem.tensors(plan)
        truth = attend_global(problem, plan, tensors)
        dense = attend_global(problem, plan, tensors, dense=True)
        for name, error, a, b in zip(NAMES, values, dense, truth, strict=True):
            assert error <= 2 * relative_error(a, b), f"cp {cp_size}: {name} is off by {error:.2e}"


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
def test_strided_inputs_and_gradients(kernel: str) -> None:
    _assert_within(_errors(replace(MIXED, kernel=kernel, strided=True), (1, 4)), 1e-12)


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(document_lengths=(40,), anchors=((),)),
        Problem(document_lengths=(40,), anchors=((None, None, None),)),
        Problem(document_lengths=(3,), anchors=((1, 2),), strategy="none"),
        Problem(document_lengths=(40,), anchors=((None, 30, None, None, 7),)),
    ],
    ids=["no blocks", "padding only", "fewer rows than ranks", "padding first"],
)
def test_empty_shares(problem: Problem, kernel: str) -> None:
    _assert_within(_errors(replace(problem, kernel=kernel)), 1e-12)


# Wrong variants that a tolerance must not hide: each once was a public bug.


def _local_lse_in_backward(call: Any, grad_out: Any, rows: Any, keys: Any, *stats: Any) -> Any:
    delta, _ = stats
    return _RIGHT_BACKWARD(call, grad_out, rows, keys, delta, call.forward(rows, keys)[1])


def _without_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(_RIGHT_DELTA(grad_out, out))


def _seeded_with_zero(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _RIGHT_PARTIAL(*args)
    seeded = torch.logaddexp(lse, torch.zeros_like(lse))
    return out * torch.exp(lse - seeded).unsqueeze(-1), seeded


def _by_block_index(plan: ContextPlan, rank: int) -> tuple[np.ndarray, np.ndarray]:
    start, end = _RIGHT_RANGES(plan, rank)
    return start, np.where(end > start, np.maximum.accumulate(end), end)


_RIGHT_BACKWARD = LocalAttention.backward
_RIGHT_PARTIAL = LocalAttention.forward
_RIGHT_DELTA = splitkv.row_delta
_RIGHT_RANGES = ContextPlan.key_ranges

FAULTS = {
    "local lse in backward": (LocalAttention, "backward", _local_lse_in_backward),
    "missing delta": (splitkv, "row_delta", _without_delta),
    "merge seeded with 0": (LocalAttention, "forward", _seeded_with_zero),
    "mask by block index": (ContextPlan, "key_ranges", _by_block_index),
}


def _solve_with_fault(problem: Problem, cp_size: int, fault: str) -> list[torch.Tensor] | None:
    owner, name, wrong = FAULTS[fault]
    with mock.patch.object(owner, name, wrong):
        return solve(problem, cp_size)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str) -> None:
    # Anchors in no order: there "earlier block" and "earlier position" differ.
    problem = Problem(document_lengths=(40,), anchors=((30, 7, 18, 22),))
    plan = problem.plan(2)
    shares = gloo_pool(4).run(_solve_with_fault, problem, 2, fault)
    found = assemble(plan, shares[:2])
    expected = attend_global(problem, plan, problem.tensors(plan))
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) > 1e-2
    assert relative_error(found[2], expected[2]) > 1e-3, "the gradient of k must show it"
