"""LV-XAttn (``lv_xattn``): queries travel round the ring, keys and values stay.

Forward, a visiting rank's queries meet the local keys; their running output and lse come after
them, in fp32, and go home by one hop more. Backward, queries, outputs, their gradients and the lse
visit, and the running dq follows. Communication does not depend on the context, but takes P serial
hops, and every hop waits for its slowest rank.

Source:
    Chang and Venkataraman, LV-XAttn: distributed cross-attention for long visual inputs, 2025.
"""

from collections.abc import Sequence

import torch

from megatron_splitkv.attention.merge import merge_
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


class LVXAttention(PeerStrategy):
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
        visitors = [q]
        arriving: list[Pending] = []
        for hop in range(self.size):
            coming = self._pass(visitors, ("q",), hop)
            (rows,) = visitors
            visible = self.staircase(self.rank, self.rank_before(hop))
            partial = self.attend(rows, context_k, context_v, visible)
            if hop == 0:
                total = nothing_attended(q)
                self.attend_(total, q, own_k, own_v, self.own_staircase(self.rank))
            else:
                out, lse = (pending.wait() for pending in arriving)
                total = out, lse
            if partial is not None:
                merge_(*total, *partial)
            arriving = self._shift(total, ("out", "lse"))
            visitors = [pending.wait() for pending in coming]
        running_out, lse = (pending.wait() for pending in arriving)
        out = running_out.to(q.dtype)
        return out, (q, context_k, context_v, own_k, own_v, out, lse)

    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """See `PeerStrategy.backward`."""
        q, context_k, context_v, own_k, own_v, out, lse = saved
        grad_context = zero_sum(context_k), zero_sum(context_v)
        grad_own = zero_sum(own_k), zero_sum(own_v)
        visitors = [q, out, grad_out, lse]
        grad_rows = zero_sum(q)
        arriving: list[Pending] = []
        for hop in range(self.size):
            coming = self._pass(visitors, ("q", "out", "grad_out", "lse"), hop)
            rows, rows_out, rows_grad_out, rows_lse = visitors
            visible = self.staircase(self.rank, self.rank_before(hop))
            partial = self.gradients(
                rows_grad_out, rows, context_k, context_v, rows_out, rows_lse, visible
            )
            if hop == 0:
                own = self.own_staircase(self.rank)
                by_own = self.gradients(grad_out, q, own_k, own_v, out, lse, own)
                add_((grad_rows, *grad_own), by_own)
            for pending in arriving:
                grad_rows = pending.wait()
            add_((grad_rows, *grad_context), partial)
            arriving = self._shift([grad_rows], ("grad_q",))
            visitors = [pending.wait() for pending in coming]
        (grad_q,) = (pending.wait() for pending in arriving)
        return in_dtype_of(saved, grad_q, *grad_context, *grad_own)

    def _pass(
        self, visitors: Sequence[torch.Tensor], labels: Sequence[str], hop: int
    ) -> list[Pending]:
        """Send visitors on before they are attended, but for the last hop: all have seen them."""
        return [] if hop == self.size - 1 else self._shift(visitors, labels)

    def _shift(self, tensors: Sequence[torch.Tensor], labels: Sequence[str]) -> list[Pending]:
        return [
            launch_shift(x, self.group, label=label, received_rows=self.query_rows)
            for label, x in zip(labels, tensors, strict=True)
        ]
