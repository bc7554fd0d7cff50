"""Sliding windows through the kernels, all ranks on one process, against fp64 truth."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import Kernel, cpu, naive
from megatron_splitkv.attention.merge import merge_
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, LeafLimits, Staircase, context_plan
from megatron_splitkv.testing import (
    dense_sdpa_attention,
    reference_attention,
    relative_error,
    visibility_mask,
)
from tests.distributed.attention_problem import Problem, assemble, own_slice, shard_keys

NAMES = ("out", "grad_q", "grad_k", "grad_v")
# Anchors closer than a block, equal anchors, a document's first position, padding blocks, documents
# shorter than a window, and one long enough for several groups of blocks.
PROBLEM = Problem(
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
WINDOWS = (1, 2, 3, 4, 5, 30, 100, 1000)
WHOLE, CUT = LeafLimits(), LeafLimits(rows=0, keys=0, pairs=0)

Tensors = Sequence[torch.Tensor]


def attend(
    plan: ContextPlan,
    tensors: Tensors,
    window: int | None,
    kernel: Kernel,
    limits: LeafLimits = WHOLE,
) -> list[torch.Tensor]:
    """Output and gradients as all ranks would compute them, one after the other."""
    q, k, v, grad_out = tensors
    scale = q.shape[-1] ** -0.5
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    parts: list[tuple[slice, torch.Tensor, torch.Tensor, Staircase]] = []
    for rank in range(plan.cp_size):
        context = plan.staircase(rank, limits, window=window)
        own = plan.own_staircase(rank, window)
        assert own is not None
        size = plan.num_rows(rank)
        local_k, local_v = shard_keys(k, plan, rank), shard_keys(v, plan, rank)
        everything = slice(0, q.shape[0])
        parts.append((everything, local_k[:size], local_v[:size], context))
        parts.append((own_slice(plan, rank), local_k[size:], local_v[size:], own))
    for rows, local_k, local_v, staircase in parts:
        part = kernel.forward(q[rows], local_k, local_v, staircase, scale)
        merge_(out[rows], lse[rows], *part)
    grad_q, grads = torch.zeros_like(q), []
    for rows, local_k, local_v, staircase in parts:
        part_q, *part_keys = kernel.backward(
            grad_out[rows], q[rows], local_k, local_v, out[rows], lse[rows], staircase, scale
        )
        grad_q[rows] += part_q
        grads.append(part_keys)
    shares = []
    for rank in range(plan.cp_size):
        mine = own_slice(plan, rank)
        keys = [torch.cat(pair) for pair in zip(*grads[2 * rank : 2 * rank + 2], strict=True)]
        shares.append([out[mine], grad_q[mine], *keys])
    return assemble(plan, shares)


def truth(
    plan: ContextPlan, tensors: Tensors, window: int | None, *, dense: bool = False
) -> list[torch.Tensor]:
    *operands, grad_out = tensors
    leaves = [x.clone().requires_grad_() for x in operands]
    if dense:
        out = dense_sdpa_attention(*leaves, plan.layout, window=window)
    else:
        out, _ = reference_attention(*leaves, plan.layout, window=window)
    out.backward(grad_out)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: relative_error(a, b) for name, a, b in pairs}


def test_the_reference_sees_what_the_definition_says() -> None:
    layout = BlockLayout([2, 7, 5, 0], [0, 4, 4, 0], [True, True, True, False], 3)
    for window in (None, *range(1, 12)):
        mask = visibility_mask(layout, 9, window)
        assert mask.shape == (12, 9 + 12)
        for block in range(4):
            anchor, start = int(layout.anchor_positions[block]), int(layout.document_starts[block])
            for slot in range(3):
                context = [
                    x for x in range(start, anchor) if window is None or anchor + slot - x < window
                ]
                own = [s for s in range(3) if window is None or 0 <= slot - s < window]
                seen = [*context, *(9 + 3 * block + s for s in own)]
                row = mask[3 * block + slot].nonzero().ravel().tolist()
                assert row == (seen if layout.block_keep_mask[block] else [])


def test_both_references_agree() -> None:
    plan = PROBLEM.plan(1)
    tensors = PROBLEM.tensors(plan)
    for window in WINDOWS:
        dense = truth(plan, tensors, window, dense=True)
        for error in errors(dense, truth(plan, tensors, window)).values():
            assert error < 1e-12


@pytest.mark.parametrize("limits", [WHOLE, CUT], ids=["leaves", "no leaves"])
@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_outputs_and_gradients_equal_the_reference(
    cp_size: int, kernel: Kernel, limits: LeafLimits
) -> None:
    plan = PROBLEM.plan(cp_size)
    tensors = PROBLEM.tensors(plan)
    for window in WINDOWS:
        found = attend(plan, tensors, window, kernel, limits)
        for name, error in errors(found, truth(plan, tensors, window)).items():
            assert error < 1e-12, f"window {window}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("num_key_heads", [6, 3, 1], ids=["mha", "gqa", "mqa"])
def test_head_groupings(num_key_heads: int, kernel: Kernel) -> None:
    problem = replace(PROBLEM, num_heads=6, num_key_heads=num_key_heads)
    plan = problem.plan(2)
    tensors = problem.tensors(plan)
    for window in (3, 40):
        found = attend(plan, tensors, window, kernel)
        for name, error in errors(found, truth(plan, tensors, window)).items():
            assert error < 1e-12, f"window {window}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("limits", [WHOLE, CUT], ids=["leaves", "no leaves"])
@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
def test_rows_that_nothing_sees_may_hold_nan(kernel: Kernel, limits: LeafLimits) -> None:
    plan = PROBLEM.plan(2)
    for window in (1, 6, 40):
        mask = visibility_mask(plan.layout, plan.context_length, window)
        blind, unseen = ~mask.any(dim=1), ~mask.any(dim=0)
        assert bool(unseen[: plan.context_length].any())
        assert bool(blind.any())
        results = []
        for fill in (0.0, torch.nan):
            q, k, v, grad_out = PROBLEM.tensors(plan)
            q[blind], grad_out[blind], k[unseen], v[unseen] = fill, fill, fill, fill
            results.append(attend(plan, [q, k, v, grad_out], window, kernel, limits))
        for name, a, b in zip(NAMES, *results, strict=True):
            assert torch.equal(a, b), f"window {window}: {name}"


# Wrong variants that must be seen.


def _window_starts(change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    right = ContextPlan._window_starts
    return lambda plan, rank, window: change(right(plan, rank, window))


def _one_further(plan: ContextPlan, rank: int, window: int) -> np.ndarray:
    return _RIGHT_STARTS(plan, rank, window + 1)


def _one_nearer(plan: ContextPlan, rank: int, window: int) -> np.ndarray:
    return _RIGHT_STARTS(plan, rank, window - 1)


def _own(window_of: Callable[[int], int | None]) -> Callable[..., Staircase]:
    return lambda keep, size, window: _RIGHT_OWN(keep, size, window_of(window))


_RIGHT_STARTS = ContextPlan._window_starts
_RIGHT_OWN = context_plan.own_block_staircase

FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "window too long": (ContextPlan, "_window_starts", _one_further),
    "window too short": (ContextPlan, "_window_starts", _one_nearer),
    "every slot like the first": (
        ContextPlan,
        "_window_starts",
        _window_starts(lambda starts: starts[:, :1].repeat(starts.shape[1], axis=1)),
    ),
    "every slot like the last": (
        ContextPlan,
        "_window_starts",
        _window_starts(lambda starts: starts[:, -1:].repeat(starts.shape[1], axis=1)),
    ),
    "own block not causal": (context_plan, "own_block_staircase", _own(lambda _: None)),
    "own block without window": (context_plan, "own_block_staircase", _own(lambda _: 100)),
    "own window too long": (context_plan, "own_block_staircase", _own(lambda w: w + 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_variants_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PROBLEM.plan(2)
    tensors = PROBLEM.tensors(plan)
    expected = truth(plan, tensors, 3)
    assert max(errors(attend(PROBLEM.plan(2), tensors, 3, cpu), expected).values()) < 1e-12
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    assert min(errors(attend(plan, tensors, 3, cpu), expected).values()) > 1e-2
