"""Reported faults with their numbers, for the peers of split-KV (see `test_attention_cases`)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.attention.strategies.lv_xattn import LVXAttention
from megatron_splitkv.attention.strategies.ringx import RingXAttention
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.testing import gloo_pool, relative_error, subgroup
from tests.distributed.attention_problem import (
    NAMES,
    Problem,
    assemble,
    attend_global,
    attend_sharded,
)
from tests.distributed.test_attention_cases import (
    A10,
    SHARDS,
    _one_key_head_for_four_ranks,
    _tensor_and_context_parallel,
)

PEERS = CP_COMM_TYPES[1:]

# A6: these very log-sum-exps on two shards. One-row blocks; a document each, with one row on either
# rank, and the fourth with a row on rank 1 alone. A block's own row weighs exp(-1e4), nothing.


def _lse_pairs_plan(swapped: bool) -> ContextPlan:
    # Rows: three documents of (rank 0, rank 1, unseen), one of (rank 1, unseen).
    owner = np.array([0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0])
    starts = np.array([0, 3, 6, 9])
    layout = BlockLayout(starts + np.array([2, 2, 2, 1]), starts, np.ones(4, dtype=np.bool_), 1)
    return ContextPlan(layout, np.arange(12), owner ^ swapped, 2, "none")


def _solve_lse_pairs(comm: str, kernel: str, swapped: bool) -> list[torch.Tensor] | None:
    """This rank's lse, outputs and gradients."""
    group, rank = subgroup(range(2)), dist.get_rank()
    if rank >= 2:
        return None
    plan = _lse_pairs_plan(swapped)
    q, k = torch.eye(4)[:, None], torch.zeros(11, 1, 4)
    for document, pair in enumerate(SHARDS):
        scores = [score for score in pair if score != -torch.inf]
        for row, score in enumerate(scores):
            k[3 * document + row, 0, document] = score
    v = torch.arange(11.0)[:, None, None].expand(11, 1, 4).clone()
    mine, rows = slice(2 * rank, 2 * rank + 2), torch.from_numpy(plan.rows(rank))
    own_k = -1e4 * q[mine]
    leaves = [q[mine], k[rows], v[rows], own_k, torch.ones_like(own_k)]
    kind = {"ringx": RingXAttention, "lv_xattn": LVXAttention}[comm]
    attention = kind(plan, group, kernel=select_kernel(kernel, leaves[0], 1), softmax_scale=1.0)
    out, saved = attention.forward(*leaves)
    return [saved[-1], out, *attention.backward(torch.ones_like(out), saved)]


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("comm", ["ringx", "lv_xattn"])
def test_a6_lse_pairs_merge_without_overflow(comm: str, kernel: str) -> None:
    straight, swapped = (
        gloo_pool(4).run(_solve_lse_pairs, comm, kernel, swap)[:2] for swap in (False, True)
    )
    lse, out = (torch.cat([straight[rank][i] for rank in range(2)]) for i in (0, 1))
    torch.testing.assert_close(
        lse[:, 0], torch.tensor([100.0, 100.0, 1000.6931, 5.0]), rtol=1e-7, atol=0.0
    )
    # Row 1 of its document wins by exp(100) and more; equal scores share; the last has one key.
    expected = torch.tensor([1.0, 4.0, 6.5, 9.0])
    # fp32 knows a log-sum-exp of 1000 to 3e-5, hence the weights of the third.
    torch.testing.assert_close(out[:, 0, 0], expected, rtol=4e-5, atol=0.0)
    for found in (straight, swapped):
        assert all(bool(x.isfinite().all()) for rank in range(2) for x in found[rank])
    for rank in range(2):
        for i in (0, 1, 2):  # lse, out, dq
            torch.testing.assert_close(swapped[rank][i], straight[rank][i], rtol=4e-5, atol=4e-5)


# A10


@pytest.mark.parametrize("comm", PEERS)
def test_a10_query_heads_meet_their_key_heads_under_tp_and_cp(comm: str) -> None:
    """One key head for four query heads on each tensor-parallel rank: `a2a` replicates it."""
    answers = gloo_pool(4).run(_tensor_and_context_parallel, replace(A10, comm=comm))
    kept_rows = 7 * A10.block_size
    for tp_rank, expected in ((0, 1.0), (1, 2.0)):
        out = torch.cat([answers[tp_rank], answers[tp_rank + 2]])
        torch.testing.assert_close(out[:kept_rows], torch.full_like(out[:kept_rows], expected))
        assert out[kept_rows:].count_nonzero() == 0


@pytest.mark.parametrize("comm", PEERS)
def test_a10_more_ranks_than_key_heads(comm: str) -> None:
    problem = replace(A10, comm=comm)
    out = torch.cat(gloo_pool(8).run(_one_key_head_for_four_ranks, problem))
    kept = out[: 7 * A10.block_size]
    torch.testing.assert_close(kept[:, :4], torch.full_like(kept[:, :4], 1.0))
    torch.testing.assert_close(kept[:, 4:], torch.full_like(kept[:, 4:], 2.0))


def _share_of_heads(problem: Problem) -> list[list[torch.Tensor]]:
    """Output and gradients of this rank's half of the heads, for every peer."""
    tp_rank, groups = dist.get_rank() % 2, [subgroup((0, 2)), subgroup((1, 3))]
    found = []
    for comm in PEERS:
        plan = problem.plan(2)
        halves = [x.chunk(2, dim=1)[tp_rank] for x in problem.tensors(plan)]
        found.append(attend_sharded(replace(problem, comm=comm), plan, halves, groups[tp_rank]))
    return found


def test_a10_gradients_of_replicated_key_heads_are_whole_under_tp_and_cp() -> None:
    """What the ranks that share a key head contribute to it adds up once."""
    plan = A10.plan(2)
    truth = attend_global(A10, plan, A10.tensors(plan))
    answers: list[Any] = gloo_pool(4).run(_share_of_heads, A10)
    for i, comm in enumerate(PEERS):
        halves = [
            assemble(plan, [answers[tp_rank][i], answers[tp_rank + 2][i]]) for tp_rank in (0, 1)
        ]
        for name, a, b, whole in zip(NAMES, *halves, truth, strict=True):
            assert relative_error(torch.cat([a, b], dim=1), whole) < 1e-12, (comm, name)
