"""`context_parallel_attention` on the `te` kernel over the emulated contract, on 1 to 4 ranks."""

from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from megatron_splitkv.attention.kernels import selection
from megatron_splitkv.attention.kernels.te import TeKernel
from megatron_splitkv.plan import LeafLimits
from megatron_splitkv.testing import gloo_pool, relative_error
from tests.attention.thd_emulator import ThdEmulator
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    solve,
)
from tests.distributed.test_attention_equality import CP_SIZES, DEEP, MIXED


class RectanglesOnly(TeKernel):
    """Not one masked leaf: these problems are smaller than a tile."""

    LEAF_LIMITS: ClassVar[LeafLimits] = LeafLimits(0, 0, 0)


def _solve_on_te(
    problem: Problem, cp_sizes: tuple[int, ...], kind: type[TeKernel], fault: dict[str, bool]
) -> tuple[list[Any], int]:
    """A rank's shares with the emulator as the device, and how often it was called."""
    emulator = ThdEmulator(**fault)
    kernel = kind(emulator.bound(), zero_unused_rows=True)
    with mock.patch.object(selection, "find_kernel", return_value=kernel):
        return [solve(problem, cp_size) for cp_size in cp_sizes], len(emulator.calls)


def _errors(
    problem: Problem,
    cp_sizes: tuple[int, ...] = CP_SIZES,
    kind: type[TeKernel] = RectanglesOnly,
    **fault: bool,
) -> dict[int, list[float]]:
    problem = replace(problem, kernel="te")
    ranks = gloo_pool(4).run(_solve_on_te, problem, cp_sizes, kind, fault)
    errors = {}
    for i, cp_size in enumerate(cp_sizes):
        plan = problem.plan(cp_size)
        found = assemble(plan, [shares[i] for shares, _ in ranks[:cp_size]])
        expected = attend_global(problem, plan, problem.tensors(plan))
        errors[cp_size] = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    return errors


def _assert_within(errors: dict[int, list[float]], bound: float) -> None:
    for cp_size, values in errors.items():
        for name, error in zip(NAMES, values, strict=True):
            assert error <= bound, f"cp {cp_size}: {name} is off by {error:.2e}"


@pytest.mark.parametrize("kind", [RectanglesOnly, TeKernel], ids=["rectangles", "leaves"])
@pytest.mark.parametrize("problem", [MIXED, DEEP], ids=["mixed", "deep"])
def test_fp64_equals_one_process(problem: Problem, kind: type[TeKernel]) -> None:
    _assert_within(_errors(problem, kind=kind), 1e-12)


@pytest.mark.parametrize("num_key_heads", [6, 3, 1])
def test_head_groupings(num_key_heads: int) -> None:
    problem = replace(MIXED, num_heads=6, num_key_heads=num_key_heads)
    _assert_within(_errors(problem, (1, 3)), 1e-12)


def test_windows() -> None:
    _assert_within(_errors(replace(MIXED, window=9), (1, 3)), 1e-12)


def test_fp32_error_is_fp32_noise() -> None:
    _assert_within(_errors(replace(DEEP, dtype=torch.float32)), 1.5e-6)


@pytest.mark.parametrize("num_key_heads", [4, 1])
def test_bf16_error_is_within_twice_one_process(num_key_heads: int) -> None:
    problem = replace(DEEP, dtype=torch.bfloat16, num_key_heads=num_key_heads)
    for cp_size, values in _errors(problem).items():
        plan = problem.plan(cp_size)
        tensors = problem.tensors(plan)
        truth = attend_global(problem, plan, tensors)
        dense = attend_global(problem, plan, tensors, dense=True)
        for name, error, a, b in zip(NAMES, values, dense, truth, strict=True):
            assert error <= 2 * relative_error(a, b), f"cp {cp_size}: {name} is off by {error:.2e}"


@pytest.mark.parametrize(
    "problem",
    [
        Problem(document_lengths=(40,), anchors=((None, None, None),)),
        Problem(document_lengths=(3,), anchors=((1, 2),), strategy="none"),
        replace(MIXED, strided=True),
    ],
    ids=["padding only", "fewer rows than ranks", "strided"],
)
def test_empty_shares_and_strides(problem: Problem) -> None:
    _assert_within(_errors(problem), 1e-12)


def test_every_rank_calls_the_functions() -> None:
    problem = replace(DEEP, kernel="te")
    for _, num_calls in gloo_pool(4).run(_solve_on_te, problem, (4,), RectanglesOnly, {}):
        assert num_calls >= 4  # context and own blocks, forward and backward


def test_ranges_at_wrong_places_are_seen() -> None:
    errors = _errors(MIXED, (1, 3), ignores_starts=True)
    assert all(max(values) > 1e-2 for values in errors.values())
