"""Ring attention (``p2p``): keys and values travel round the ring, queries stay.

Forward, a rank attends the shard that it holds while that shard goes on to the next rank.
Backward, the shards go round again; the gradient of each starts at its owner, passes every rank
that meets the shard, in fp32, and comes home by one hop more. Any plan is exact; `zigzag` is the
placement that the ring is published with. Every hop waits for its slowest rank, so balanced sums
over the hops are not enough.

Source:
    Liu et al., Ring Attention with blockwise transformers, 2023; the zigzag placement: Zhu, 2024.
"""

import torch

from megatron_splitkv.attention.strategies.region import (
    Gradients,
    PeerStrategy,
    Saved,
    add_,
    in_dtype_of,
    nothing_attended,
    zero_sum,
)
from megatron_splitkv.comm import Pending, launch_shift


class RingAttention(PeerStrategy):
    """See the module; communication grows with the context."""

    def forward(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """See `PeerStrategy.forward`."""
        total = nothing_attended(q)
        k, v = context_k, context_v
        for hop in range(self.size):
            coming = self._pass_keys(k, v, hop)
            if hop == 0:
                self.attend_(total, q, own_k, own_v, self.own_staircase(self.rank))
            self.attend_(total, q, k, v, self.staircase(self.rank_before(hop), self.rank))
            if coming:
                k, v = (pending.wait() for pending in coming)
        out, lse = total[0].to(q.dtype), total[1]
        return out, (q, context_k, context_v, own_k, own_v, out, lse)

    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """See `PeerStrategy.backward`."""
        q, context_k, context_v, own_k, own_v, out, lse = saved
        grad_q, *grad_own = map(zero_sum, (q, own_k, own_v))
        k, v = context_k, context_v
        arriving: list[Pending] = []
        for hop in range(self.size):
            coming = self._pass_keys(k, v, hop)
            shard = self.staircase(self.rank_before(hop), self.rank)
            partial = self.gradients(grad_out, q, k, v, out, lse, shard)
            if hop == 0:
                own = self.own_staircase(self.rank)
                by_own = self.gradients(grad_out, q, own_k, own_v, out, lse, own)
                add_((grad_q, *grad_own), by_own)
            sums = [pending.wait() for pending in arriving] or [zero_sum(k), zero_sum(v)]
            add_((grad_q, *sums), partial)
            rows = self.rows_of(self.rank_before(hop + 1))
            arriving = [
                launch_shift(total, self.group, label=label, received_rows=rows)
                for label, total in zip(("grad_k", "grad_v"), sums, strict=True)
            ]
            if coming:
                k, v = (pending.wait() for pending in coming)
        grad_context = (pending.wait() for pending in arriving)
        return in_dtype_of(saved, grad_q, *grad_context, *grad_own)

    def _pass_keys(self, k: torch.Tensor, v: torch.Tensor, hop: int) -> list[Pending]:
        """Send the shard on before it is attended; after the last hop nobody needs it."""
        if hop == self.size - 1:
            return []
        rows = self.rows_of(self.rank_before(hop + 1))
        return [
            launch_shift(x, self.group, label=label, received_rows=rows)
            for label, x in (("k", k), ("v", v))
        ]
