"""RingX1 (``ringx``): turns of broadcasts and reductions instead of a ring of neighbours.

Forward, each rank's queries are broadcast in turn; all ranks attend them to their keys, agree on
the largest lse, and reduce numerators and denominators, relative to it, to the queries' owner.
Backward, each rank's keys and values are broadcast in turn, met by everybody's queries, and their
gradients reduced to their owner, in fp32: backward traffic grows with the context. A turn waits for
its slowest rank.

Source:
    Yin et al., RingX: scalable parallel attention for long-context learning on HPC, 2025.
"""

import torch

from megatron_splitkv.attention.merge import softmax_weight
from megatron_splitkv.attention.strategies.region import (
    Gradients,
    PeerStrategy,
    Saved,
    add_,
    in_dtype_of,
    nothing_attended,
    zero_sum,
)
from megatron_splitkv.comm import Pending, all_reduce_max, launch_broadcast, launch_reduce_sum


class RingXAttention(PeerStrategy):
    """See the module."""

    def forward(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """See `PeerStrategy.forward`."""
        coming = self._broadcast_queries(q, 0)
        reducing: list[Pending] = []
        mine: list[torch.Tensor] = []
        for turn in range(self.size):
            rows = coming.wait()
            if turn + 1 < self.size:
                coming = self._broadcast_queries(q, turn + 1)
            out, lse = total = nothing_attended(rows)
            self.attend_(total, rows, context_k, context_v, self.staircase(self.rank, turn))
            if turn == self.rank:
                self.attend_(total, q, own_k, own_v, self.own_staircase(self.rank))
            largest = all_reduce_max(lse, self.group, label="lse_max")
            denominator = softmax_weight(lse, largest)
            numerator = out.mul_(denominator.unsqueeze(-1))
            for pending in reducing:  # two turns' buffers at most
                pending.wait()
            reducing = [
                launch_reduce_sum(x, turn, self.group, label=label)
                for label, x in (("numerator", numerator), ("denominator", denominator))
            ]
            if turn == self.rank:
                mine = [numerator, denominator, largest]
        for pending in reducing:
            pending.wait()
        numerator, denominator, largest = mine
        blind = denominator == 0  # padding blocks
        out = (numerator / denominator.masked_fill(blind, 1.0).unsqueeze(-1)).to(q.dtype)
        lse = largest + torch.log(denominator)
        return out, (q, context_k, context_v, own_k, own_v, out, lse)

    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """See `PeerStrategy.backward`."""
        q, context_k, context_v, own_k, own_v, out, lse = saved
        grad_q, *grad_own = map(zero_sum, (q, own_k, own_v))
        coming = self._broadcast_keys(context_k, context_v, 0)
        reducing: list[Pending] = []
        for turn in range(self.size):
            kv = coming.wait()
            if turn + 1 < self.size:
                coming = self._broadcast_keys(context_k, context_v, turn + 1)
            grad_kv = zero_sum(kv)
            visible = self.staircase(turn, self.rank)
            k, v = kv
            add_((grad_q, *grad_kv), self.gradients(grad_out, q, k, v, out, lse, visible))
            for pending in reducing:
                pending.wait()
            reducing = [launch_reduce_sum(grad_kv, turn, self.group, label="grad_kv")]
            if turn == self.rank:
                mine = grad_kv
        own = self.own_staircase(self.rank)
        add_((grad_q, *grad_own), self.gradients(grad_out, q, own_k, own_v, out, lse, own))
        for pending in reducing:
            pending.wait()
        return in_dtype_of(saved, grad_q, *mine, *grad_own)

    def _broadcast_queries(self, q: torch.Tensor, owner: int) -> Pending:
        """Queries of `owner`, ``[Q_p, n_q, d]``: every rank has as many."""
        buffer = (
            q if owner == self.rank else torch.empty_like(q, memory_format=torch.contiguous_format)
        )
        return launch_broadcast(buffer, owner, self.group, label="q")

    def _broadcast_keys(self, k: torch.Tensor, v: torch.Tensor, owner: int) -> Pending:
        """Keys and values of the context rows of `owner`, ``[2, S_owner, n_kv, d]``."""
        if owner == self.rank:
            buffer = torch.stack([k, v])
        else:
            buffer = k.new_empty((2, self.rows_of(owner), *k.shape[1:]))
        return launch_broadcast(buffer, owner, self.group, label="kv")
