"""What the peers of split-KV share: one autograd node, visibility by pairs of ranks, kernel calls.

A strategy moves queries or keys until every query row has met every key; each meeting of one rank's
query rows and one rank's keys is a kernel call with the plan's staircase for that pair, and partial
results merge by log-sum-exp. Backward, every meeting gets the global lse and the whole output (or
anything with its rowsum, the carrier), so that its gradients are complete but for sums over
meetings, which add up in fp32.

Keys of the own draft blocks stay where their queries are, wherever the strategy has these.

Shape legend: Q_p query rows and S_p context rows of rank p, n_q and n_kv heads, d head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_splitkv.attention.kernels import Kernel
from megatron_splitkv.attention.merge import accumulator_dtype, merge_
from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.plan import ContextPlan, Staircase

# Of q, context k and v, own k and v.
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Saved = tuple[torch.Tensor, ...]
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PeerStrategy(ABC):
    """One attention of one micro-batch over a group of two ranks or more.

    All ranks take the same steps in the same order, whatever they see.

    Args:
        plan: the plan of the micro-batch, equal on all ranks.
        group: the context-parallel group.
        kernel: the local attention kernel.
        softmax_scale: factor on the scores.
        window: of a sliding-window layer; None for full attention.
    """

    def __init__(
        self,
        plan: ContextPlan,
        group: dist.ProcessGroup,
        *,
        kernel: Kernel,
        softmax_scale: float,
        window: int | None = None,
    ) -> None:
        self.plan = plan
        self.group = group
        self.rank = group_rank(group)
        self.size = group_size(group)
        self.kernel = kernel
        self.softmax_scale = softmax_scale
        self.window = window

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """Whole output of this rank's query rows, and what `backward` needs.

        Shape:
            q ``[Q_p, n_q, d]``, context ``[S_p, n_kv, d]``, own ``[Q_p, n_kv, d]`` -> like q.
        """

    @abstractmethod
    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """Gradients of all inputs of `forward`, complete, in their dtypes."""

    def __call__(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> torch.Tensor:
        """`forward` for autograd to follow, in the precision of its inputs: no autocast."""
        out: torch.Tensor = _Region.apply(q, context_k, context_v, own_k, own_v, self)
        return out

    # Who meets whom

    def rank_before(self, hops: int) -> int:
        """The rank that lies so many places before this one in the ring."""
        return (self.rank - hops) % self.size

    def rows_of(self, rank: int) -> int:
        """Context rows of a rank."""
        return self.plan.num_rows(rank)

    @property
    def query_rows(self) -> int:
        """Q_p, the same on every rank."""
        return self.plan.blocks_per_rank * self.plan.block_size

    def staircase(self, keys_of: int, queries_of: int) -> Staircase:
        """Visibility of one rank's context rows to one rank's own blocks."""
        return self.plan.pair_staircase(keys_of, queries_of, self.kernel.LEAF_LIMITS, self.window)

    def own_staircase(self, rank: int) -> Staircase:
        """Visibility of a rank's own blocks to themselves."""
        staircase = self.plan.own_staircase(rank, self.window)
        assert staircase is not None, "a plan of draft blocks has keys of theirs"
        return staircase

    # Meetings

    def attend(
        self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, staircase: Staircase
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and lse of rows over some keys, in the accumulator dtype; None: they see none."""
        if not staircase.needed_pairs:
            return None
        return self.kernel.forward(rows, k, v, staircase, self.softmax_scale)

    def attend_(
        self,
        total: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staircase: Staircase,
    ) -> None:
        """`attend`, and merge the result into a running output and lse, in place."""
        partial = self.attend(rows, k, v, staircase)
        if partial is not None:
            merge_(*total, *partial)

    def gradients(
        self,
        grad_out: torch.Tensor,
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        carrier: torch.Tensor,
        lse: torch.Tensor,
        staircase: Staircase,
    ) -> Partial | None:
        """What one meeting contributes to the gradients.

        Args:
            grad_out: gradient of the rows' whole output.
            rows: the queries.
            k: the keys that they meet.
            v: their values.
            carrier: the rows' whole output.
            lse: the rows' log-sum-exp over the keys of all ranks.
            staircase: who sees what.

        Returns:
            dq in the accumulator dtype, dk and dv in that of the keys; None if nothing is seen.
        """
        if not staircase.needed_pairs:
            return None
        return self.kernel.backward(
            grad_out, rows, k, v, carrier, lse, staircase, self.softmax_scale
        )


def nothing_attended(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output 0 and lse -inf, the neutral element of a merge, in the accumulator dtype.

    Shape:
        ``[R, n_q, d]`` -> ``[R, n_q, d]``, ``[R, n_q]``.
    """
    dtype = accumulator_dtype(rows.dtype)
    return (
        torch.zeros(rows.shape, dtype=dtype, device=rows.device),
        torch.full(rows.shape[:2], -torch.inf, dtype=dtype, device=rows.device),
    )


def zero_sum(x: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of `x` in the accumulator dtype, contiguous."""
    return torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device)


def add_(sums: Iterable[torch.Tensor], partial: Iterable[torch.Tensor] | None) -> None:
    """Add what a meeting contributed to running sums, in place."""
    for total, part in zip(sums, partial, strict=True) if partial is not None else ():
        total += part


def in_dtype_of(saved: Saved, *sums: torch.Tensor) -> Gradients:
    """Sums for q, context k and v, own k and v, in the dtype of these inputs, which is one."""
    grad_q, context_k, context_v, own_k, own_v = (x.to(saved[0].dtype) for x in sums)
    return grad_q, context_k, context_v, own_k, own_v


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        strategy: PeerStrategy,
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, saved = strategy.forward(q, context_k, context_v, own_k, own_v)
        ctx.strategy = strategy
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            gradients = ctx.strategy.backward(grad_out, ctx.saved_tensors)
        return *gradients, None
