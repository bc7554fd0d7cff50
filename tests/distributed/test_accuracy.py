"""The accuracy bound of every kernel, precision, head grouping and number of ranks.

Against fp64 truth: fp32 within noise, bf16 within twice a one-process reference of that precision.
Kernels for GPUs run on emulators of the contracts that they stand on.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.kernels import flash, flex, selection
from megatron_splitkv.attention.kernels.te import TeKernel
from megatron_splitkv.testing import gloo_pool, reference_attention, relative_error
from tests.attention.flash_emulator import FlashEmulator
from tests.attention.test_flex_kernel import dense_stand_in
from tests.attention.thd_emulator import ThdEmulator
from tests.distributed.attention_problem import NAMES, Problem, assemble, attend_global, solve

CP_SIZES = (1, 2, 3, 4, 8)
GROUPINGS = {"MHA": 6, "GQA": 3, "MQA": 1}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# Overlapping and equal anchors, padding, a document that nobody asks about; 24 blocks, which all
# numbers of ranks divide, so that all solve the same problem.
PROBLEM = Problem(
    document_lengths=(260, 41, 9, 130),
    anchors=(
        (0, 17, 44, 45, 45, 90, 133, 180, 201, 244, 259),
        (40, 3, None),
        (),
        (129, 128, 100, None, 70, 10, 1, 66, 67, 121),
    ),
    tail_rows=5,
    num_heads=6,
    strategy="balanced",
    chunks_per_rank=3,
    head_width=16,
    options=SplitKVOptions(query_cast="all"),
)


def _te() -> list[Any]:
    kernel = TeKernel(ThdEmulator().bound(), zero_unused_rows=True)
    return [mock.patch.object(selection, "find_kernel", return_value=kernel)]


def _flash() -> list[Any]:
    emulator = FlashEmulator()
    return [
        mock.patch.object(selection, "find_kernel", return_value=flash),
        mock.patch.object(flash, "_flash_forward", emulator.forward),
        mock.patch.object(flash, "_flash_backward", emulator.backward),
    ]


def _flex() -> list[Any]:
    return [
        mock.patch.object(selection, "find_kernel", return_value=flex),
        mock.patch.object(flex, "_KEY_MULTIPLE", 128),
        mock.patch.object(flex, "_flex_attention", return_value=dense_stand_in),
    ]


DEVICES: dict[str, Callable[[], list[Any]]] = {
    "naive": list,
    "cpu": list,
    "te": _te,
    "flash": _flash,
    "flex": _flex,
}


def _solve_all(problems: Sequence[Problem], cp_sizes: Sequence[int]) -> list[Any]:
    with ExitStack() as stack:
        for patch in DEVICES[problems[0].kernel]():
            stack.enter_context(patch)
        return [solve(p, cp_size) for p in problems for cp_size in cp_sizes]


@cache
def _references(problem: Problem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Truth, and what one process computes in the problem's precision."""
    plan = problem.plan(1)
    tensors = problem.tensors(plan)
    return attend_global(problem, plan, tensors), attend_global(problem, plan, tensors, dense=True)


def _check(problems: Sequence[Problem], cp_sizes: Sequence[int] = CP_SIZES) -> None:
    shares = gloo_pool(8).run(_solve_all, problems, cp_sizes)
    for i, (problem, cp_size) in enumerate(product(problems, cp_sizes)):
        plan = problem.plan(cp_size)
        found = assemble(plan, [shares[rank][i] for rank in range(cp_size)])
        truth, dense = _references(replace(problem, kernel="naive"))
        for name, a, b, c in zip(NAMES, found, truth, dense, strict=True):
            bound = {torch.float64: 1e-12, torch.float32: 1.5e-6}.get(problem.dtype)
            error = relative_error(a, b)
            bound = 2 * relative_error(c, b) if bound is None else bound
            assert error <= bound, f"{problem.dtype} cp {cp_size}: {name} {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kernel", DEVICES)
def test_every_precision_and_number_of_ranks(kernel: str, grouping: str) -> None:
    problem = replace(PROBLEM, kernel=kernel, num_key_heads=GROUPINGS[grouping])
    _check([replace(problem, dtype=dtype) for dtype in DTYPES])


@pytest.mark.parametrize("kernel", DEVICES)
def test_large_scores(kernel: str) -> None:
    """At a log-sum-exp of 130 bf16 errors do not grow with the number of ranks."""
    problem = replace(PROBLEM, kernel=kernel, dtype=torch.bfloat16, score_scale=45.0)
    q, k, v, _ = problem.tensors(problem.plan(1))
    _, lse = reference_attention(q, k, v, problem.plan(1).layout)
    assert 130 < lse.max() < 250
    _check([problem])
