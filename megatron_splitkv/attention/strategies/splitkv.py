"""Split-KV: keys and values stay where they are; queries, partial outputs and statistics travel.

Forward, on rank p: gather the queries of all ranks; attend them to the local context, and the own
blocks to themselves; agree on the log-sum-exp over all keys; send each rank the partial outputs of
its rows, weighted by exp(lse_p - lse), and add up what arrives.

Backward: the owner of a row holds its whole output, so it computes delta = rowsum(dO * O) and
gathers it along with dO. With the global lse and delta each rank's backward is local: dk and dv are
complete, dq is partial and goes to its owner as the outputs did.

Communication depends on the queries alone, never on the context length.

Shape legend: Q query rows of all ranks, Q_p of this one, S_p context rows of this rank, n_q and
n_kv heads, d head width. All rows lie as the plan orders them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_splitkv.attention.kernels import Kernel, select_kernel
from megatron_splitkv.attention.merge import (
    delta_carrier,
    finite_or_zero,
    merge_,
    row_delta,
    softmax_weight,
)
from megatron_splitkv.comm import (
    all_reduce_max,
    all_reduce_sum,
    gather_rows,
    group_rank,
    reduce_scatter_rows,
)
from megatron_splitkv.plan import ContextPlan, Staircase


def splitkv_attention(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: ContextPlan,
    cp_group: dist.ProcessGroup | None,
    *,
    kernel: str = "auto",
    softmax_scale: float,
) -> torch.Tensor:
    """Attention of this rank's draft blocks to all ranks' context and to themselves.

    Every rank of the group calls it with the same plan. The sizes of all collectives follow from
    the plan: nothing is exchanged to agree on them and the host waits for no tensor.

    Args:
        q: this rank's query rows.
        context_k: keys of this rank's context rows.
        context_v: their values.
        own_k: keys of this rank's own blocks' rows.
        own_v: their values.
        plan: the plan of the micro-batch.
        cp_group: the context-parallel group; None for one process.
        kernel: name of the local attention kernel.
        softmax_scale: factor on the scores.

    Returns:
        The whole attention output of this rank's rows; 0, with gradient 0, for padding blocks.

    Shape:
        q, own_k, own_v ``[Q_p, heads, d]``, context_k and context_v ``[S_p, n_kv, d]`` ->
        ``[Q_p, n_q, d]``.
    """
    rank = group_rank(cp_group)
    local_attention = select_kernel(kernel, q.device)
    task = _Task(
        group=cp_group,
        kernel=local_attention,
        context=plan.staircase(rank, local_attention.LEAF_LIMITS),
        own=plan.build_own_staircase(rank, None),
        softmax_scale=softmax_scale,
        own_rows=slice(rank * q.shape[0], (rank + 1) * q.shape[0]),
    )
    out: torch.Tensor = _SplitKVAttention.apply(q, context_k, context_v, own_k, own_v, task)
    return out


@dataclass(frozen=True)
class _Task:
    """What does not change between forward and backward, and is no tensor."""

    group: dist.ProcessGroup | None
    kernel: Kernel
    context: Staircase  # all blocks x this rank's context rows
    own: Staircase  # this rank's blocks x their own rows
    softmax_scale: float
    own_rows: slice  # this rank's rows among all query rows


class _SplitKVAttention(torch.autograd.Function):
    """The forward and backward of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        task: _Task,
    ) -> torch.Tensor:
        all_q = gather_rows(q, task.group, label="q")
        partial_out, partial_lse = _partial_attention(
            all_q, q, context_k, context_v, own_k, own_v, task
        )
        lse = _global_lse(partial_lse, task.group)
        partial_out.mul_(softmax_weight(partial_lse, lse).unsqueeze(-1))
        out = reduce_scatter_rows(partial_out, task.group, wire_dtype=q.dtype, label="out")
        out = out.to(q.dtype)
        ctx.task = task
        ctx.save_for_backward(all_q, context_k, context_v, own_k, own_v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        task: _Task = ctx.task
        all_q, context_k, context_v, own_k, own_v, out, lse = ctx.saved_tensors
        delta = row_delta(grad_out, out)
        all_grad_out = gather_rows(grad_out, task.group, label="grad_out")
        all_delta = gather_rows(delta, task.group, label="delta")
        carrier = delta_carrier(all_grad_out, all_delta)
        partial_grad_q, grad_context_k, grad_context_v, grad_own_k, grad_own_v = (
            _partial_attention_backward(
                all_grad_out, all_q, context_k, context_v, own_k, own_v, carrier, lse, task
            )
        )
        grad_q = reduce_scatter_rows(
            partial_grad_q, task.group, wire_dtype=all_q.dtype, label="grad_q"
        )
        return (
            grad_q.to(all_q.dtype),
            grad_context_k,
            grad_context_v,
            grad_own_k,
            grad_own_v,
            None,
        )


def _partial_attention(
    all_q: torch.Tensor,
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    task: _Task,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All queries over the keys that this rank holds: its context, and its blocks' own rows."""
    out, lse = task.kernel.forward(all_q, context_k, context_v, task.context, task.softmax_scale)
    own_out, own_lse = task.kernel.forward(q, own_k, own_v, task.own, task.softmax_scale)
    merge_(out[task.own_rows], lse[task.own_rows], own_out, own_lse)
    return out, lse


def _partial_attention_backward(
    all_grad_out: torch.Tensor,
    all_q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    carrier: torch.Tensor,
    lse: torch.Tensor,
    task: _Task,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial dq of all query rows; complete dk and dv of the keys that this rank holds."""
    grad_q, grad_context_k, grad_context_v = task.kernel.backward(
        all_grad_out,
        all_q,
        context_k,
        context_v,
        carrier,
        lse,
        task.context,
        task.softmax_scale,
    )
    mine = task.own_rows
    own_grad_q, grad_own_k, grad_own_v = task.kernel.backward(
        all_grad_out[mine],
        all_q[mine],
        own_k,
        own_v,
        carrier[mine],
        lse[mine],
        task.own,
        task.softmax_scale,
    )
    grad_q[mine] += own_grad_q
    return grad_q, grad_context_k, grad_context_v, grad_own_k, grad_own_v


def _global_lse(partial_lse: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Log-sum-exp over all ranks' keys; -inf only where no rank sees anything.

    Shape:
        ``[Q, n_q]`` -> ``[Q, n_q]``, the same on every rank.
    """
    largest = all_reduce_max(partial_lse, group, label="lse_max")
    if largest is partial_lse:  # one rank: it is the whole
        return partial_lse
    shift = finite_or_zero(largest)
    total = all_reduce_sum(torch.exp(partial_lse - shift), group, label="lse_sum")
    return shift + torch.log(total)
