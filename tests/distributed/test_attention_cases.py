"""Faults that users of neighbouring systems reported, each with its numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import deterministic

from megatron_splitkv.attention import context_parallel_attention
from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.attention.merge import own_lse
from megatron_splitkv.comm import RowExchange
from megatron_splitkv.testing import gloo_pool, reference_attention, relative_error, subgroup
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    attend_sharded,
    own_slice,
    shard_keys,
)

KERNELS = ("naive", "cpu")


def _solve_variants(
    problem: Problem, cp_size: int, change: Callable[..., Any], variants: list[Any]
) -> list[list[torch.Tensor]] | None:
    """This rank's results for each variant of the problem's tensors."""
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return None
    plan = problem.plan(cp_size)
    return [
        attend_sharded(problem, plan, change(problem.tensors(plan), plan, variant), group)
        for variant in variants
    ]


def _results(
    problem: Problem, cp_size: int, change: Callable[..., Any], variants: list[Any]
) -> list[list[torch.Tensor]]:
    """Global results for each variant."""
    shares = gloo_pool(4).run(_solve_variants, problem, cp_size, change, variants)
    plan = problem.plan(cp_size)
    return [
        assemble(plan, [shares[rank][i] for rank in range(cp_size)]) for i in range(len(variants))
    ]


# A1


def _perturb_for_block_1(tensors: list[torch.Tensor], plan: Any, what: str) -> list[torch.Tensor]:
    q, k, v, grad_out = (x.clone() for x in tensors)
    block = plan.layout.block_size
    grad_out[:block] = 0.0  # only block 1 has a loss
    grad_out[2 * block :] = 0.0
    if what == "context from 5 on":
        k[5:16] += 7.0
        v[5:16] -= 7.0
    elif what == "block 0":
        q[:block] += 7.0
        k[16 : 16 + block] += 7.0
        v[16 : 16 + block] -= 7.0
    elif what == "context at 4":
        v[4] += 7.0
    return [q, k, v, grad_out]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a1_overlapping_anchors_do_not_leak(cp_size: int, kernel: str) -> None:
    problem = Problem(document_lengths=(16,), anchors=((3, 5, 6),), kernel=kernel)
    variants = ["nothing", "context from 5 on", "block 0", "context at 4"]
    plain, later_context, other_block, visible = _results(
        problem, cp_size, _perturb_for_block_1, variants
    )
    block_1 = slice(4, 8)
    assert torch.equal(later_context[0][block_1], plain[0][block_1])
    assert torch.equal(other_block[0][block_1], plain[0][block_1])
    assert not torch.equal(visible[0][block_1], plain[0][block_1])
    _, grad_q, grad_k, grad_v = plain
    for grad in (grad_k, grad_v):
        assert grad[5:16].count_nonzero() == 0, "context from the anchor on"
        assert grad[16:20].count_nonzero() == 0, "slots of block 0"
        assert grad[24:].count_nonzero() == 0, "slots of block 2 and padding"
        assert bool((grad[:5] != 0).all())
        assert bool((grad[20:24] != 0).all())
    assert grad_q[:4].count_nonzero() == 0
    assert grad_q[8:].count_nonzero() == 0


# A2


def _unchanged(tensors: list[torch.Tensor], plan: Any, variant: object) -> list[torch.Tensor]:
    return tensors


LONELY = Problem(document_lengths=(64,), anchors=((10,),), strategy="none", chunks_per_rank=1)


def _solve_on_poisoned_memory(problem: Problem) -> list[torch.Tensor]:
    plan, rank = problem.plan(4), dist.get_rank()
    q, k, _, _ = problem.tensors(plan)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert bool(torch.empty(4).isnan().all()), "fresh memory is poisoned"
        kernel = select_kernel(problem.kernel, q)
        context = shard_keys(k, plan, rank)[: plan.num_rows(rank)]
        partial = kernel.forward(q, context, context, plan.staircase(rank), 1.0)
        share = attend_sharded(problem, plan, problem.tensors(plan), dist.group.WORLD)
    finally:
        torch.use_deterministic_algorithms(False)
    return [*partial, *share]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a2_rank_without_visible_keys_contributes_nothing(kernel: str) -> None:
    problem = replace(LONELY, kernel=kernel)
    plan = problem.plan(4)
    expected = attend_global(problem, plan, problem.tensors(plan))
    answers = gloo_pool(4).run(_solve_on_poisoned_memory, problem)
    for rank, (partial_out, partial_lse, *share) in enumerate(answers):
        if rank > 0:
            assert partial_out.count_nonzero() == 0
            assert bool((partial_lse == -torch.inf).all())
            assert share[2].count_nonzero() == 0, "dk"
            assert share[3].count_nonzero() == 0, "dv"
    found = assemble(plan, [answer[2:] for answer in answers])
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert relative_error(a, b) < 1e-12, name
    (clean,) = _results(problem, 4, _unchanged, [None])
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))


# A6

SHARDS = [(0.0, 100.0), (-100.0, 100.0), (1000.0, 1000.0), (-torch.inf, 5.0)]


def _merged_lse(swapped: bool) -> torch.Tensor | None:
    group, rank = subgroup(range(2)), dist.get_rank()
    if rank >= 2:
        return None
    local = torch.tensor([pair[rank ^ swapped] for pair in SHARDS])
    exchange = RowExchange(group, own_rows=2)  # of the four rows
    own = own_lse(exchange, exchange.launch_return(local[:, None], label="lse").wait())
    return exchange.launch_cast(own, label="lse").wait()[:, 0]


def test_a6_lse_merge_does_not_overflow() -> None:
    straight, same, *_ = gloo_pool(4).run(_merged_lse, False)
    swapped, *_ = gloo_pool(4).run(_merged_lse, True)
    expected = torch.tensor([100.0, 100.0, 1000.6931, 5.0])
    torch.testing.assert_close(straight, expected, rtol=1e-7, atol=0.0)
    assert torch.equal(straight, same)
    assert torch.equal(straight, swapped)


def _large_scores(tensors: list[torch.Tensor], plan: Any, scale: float) -> list[torch.Tensor]:
    q, k, v, grad_out = tensors
    return [q * scale, k, v, grad_out]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a6_scores_around_1000_stay_finite(kernel: str) -> None:
    problem = Problem(
        document_lengths=(40,), anchors=((30, 7, 18),), dtype=torch.float32, kernel=kernel
    )
    plan = problem.plan(3)
    tensors = _large_scores(problem.tensors(plan), plan, 500.0)
    _, lse = reference_attention(*tensors[:3], plan.layout)
    assert float(lse.max()) > 1000
    (found,) = _results(problem, 3, _large_scores, [500.0])
    for name, a, b in zip(NAMES, found, attend_global(problem, plan, tensors), strict=True):
        # fp32 scores of 1000 are off by 1e-4 before the softmax sees them.
        assert relative_error(a, b) < 1e-3, name


# A8


def _indexed(tensors: list[torch.Tensor], plan: Any, variant: object) -> list[torch.Tensor]:
    q, k, v, grad_out = (x.clone() for x in tensors)
    context = plan.context_length
    v[:context] = torch.arange(context, dtype=v.dtype)[:, None, None]
    return [q, k, v, grad_out]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_a8_odd_documents_lose_no_token(cp_size: int, strategy: str, kernel: str) -> None:
    problem = Problem(
        document_lengths=(7, 5, 2),
        anchors=((1, 6), (4,), (1,)),
        strategy=strategy,
        kernel=kernel,
    )
    plan = problem.plan(cp_size)
    owned = sorted(int(row) for rank in range(cp_size) for row in plan.rows(rank))
    assert owned == list(range(14))
    tensors = _indexed(problem.tensors(plan), plan, None)
    (found,) = _results(problem, cp_size, _indexed, [None])
    for name, a, b in zip(NAMES, found, attend_global(problem, plan, tensors), strict=True):
        assert relative_error(a, b) < 1e-12, name


# A10


def _tensor_and_context_parallel(problem: Problem) -> torch.Tensor:
    """Heads over 2 tensor-parallel ranks, keys over 2 context-parallel ranks."""
    tp_rank, cp_rank = dist.get_rank() % 2, dist.get_rank() // 2
    groups = [subgroup((0, 2)), subgroup((1, 3))]  # ranks that hold the same heads
    plan = problem.plan(2)
    q, k, v, _ = problem.tensors(plan)
    v[:] = torch.arange(1.0, problem.num_key_heads + 1)[:, None]
    q, k, v = (x.chunk(2, dim=1)[tp_rank] for x in (q, k, v))
    return context_parallel_attention(
        q[own_slice(plan, cp_rank)],
        shard_keys(k, plan, cp_rank),
        shard_keys(v, plan, cp_rank),
        plan,
        groups[tp_rank],
        strategy=problem.comm,
    )


def _one_key_head_for_four_ranks(problem: Problem) -> torch.Tensor:
    plan, rank = problem.plan(8), dist.get_rank()
    q, k, v, _ = problem.tensors(plan)
    v[:] = torch.arange(1.0, problem.num_key_heads + 1)[:, None]
    return context_parallel_attention(
        q[own_slice(plan, rank)],
        shard_keys(k, plan, rank),
        shard_keys(v, plan, rank),
        plan,
        dist.group.WORLD,
        strategy=problem.comm,
    )


A10 = Problem(
    document_lengths=(50,), anchors=((3, 9, 20, 33, 34, 41, 48),), num_heads=8, num_key_heads=2
)


def test_a10_query_heads_meet_their_key_heads_under_tp_and_cp() -> None:
    answers = gloo_pool(4).run(_tensor_and_context_parallel, A10)
    kept_rows = 7 * A10.block_size
    for tp_rank, expected in ((0, 1.0), (1, 2.0)):
        out = torch.cat([answers[tp_rank], answers[tp_rank + 2]])
        torch.testing.assert_close(out[:kept_rows], torch.full_like(out[:kept_rows], expected))
        assert out[kept_rows:].count_nonzero() == 0


def test_a10_more_ranks_than_key_heads() -> None:
    out = torch.cat(gloo_pool(8).run(_one_key_head_for_four_ranks, A10))
    kept = out[: 7 * A10.block_size]
    torch.testing.assert_close(kept[:, :4], torch.full_like(kept[:, :4], 1.0))
    torch.testing.assert_close(kept[:, 4:], torch.full_like(kept[:, 4:], 2.0))


# A11

TAIL = Problem(
    document_lengths=(500, 198),
    anchors=(tuple(range(40, 500, 21)), (5, 60, 61, 197, None)),
    tail_rows=6,
    dtype=torch.float32,
)


def _fill_padding(tensors: list[torch.Tensor], plan: Any, fill: float) -> list[torch.Tensor]:
    q, k, v, grad_out = (x.clone() for x in tensors)
    context = plan.context_length
    padding = torch.from_numpy(~plan.layout.block_keep_mask).repeat_interleave(
        plan.layout.block_size
    )
    q[padding] = fill
    grad_out[padding] = fill
    for x in (k, v):
        x[context - 6 : context] = fill
        x[context:][padding] = fill
    return [q, k, v, grad_out]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a11_padding_content_changes_nothing(kernel: str) -> None:
    problem = replace(TAIL, kernel=kernel)
    plan = problem.plan(4)
    padding = torch.from_numpy(~plan.layout.block_keep_mask).repeat_interleave(4)
    assert int(padding.sum()) == 4 * (plan.layout.num_blocks - 26)
    first, *others = _results(problem, 4, _fill_padding, [0.0, 1e4, torch.nan] + [torch.nan] * 19)
    for other in others:
        for name, a, b in zip(NAMES, other, first, strict=True):
            assert torch.equal(a, b), name
    out, grad_q, grad_k, grad_v = others[-1]
    assert out[padding].count_nonzero() == 0
    assert grad_q[padding].count_nonzero() == 0
    for grad in (grad_k, grad_v):
        assert grad[698:704].count_nonzero() == 0
        assert grad[704:][padding].count_nonzero() == 0
