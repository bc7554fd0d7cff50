"""Attention of the attended query rows to the keys that one rank holds: no communication.

Shape legend: A attended query rows, Q_p of them this rank's own, S_p context rows of this rank, n_q
and n_kv heads, d head width.
"""

from dataclasses import dataclass

import torch

from megatron_splitkv.attention.kernels import Kernel
from megatron_splitkv.attention.merge import delta_carrier, merge_
from megatron_splitkv.plan import Staircase

# Keys and values of the context, then of the own blocks' rows (None where there are none).
Keys = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LocalAttention:
    """Both kinds of a rank's keys behind one kernel, in the precision of its inputs: no autocast.

    Args:
        kernel: computes each kind.
        context: visibility of the context rows to the attended rows.
        own: visibility of the own blocks' rows to themselves; None if there are no such keys.
        mine: the own rows among the attended.
        softmax_scale: factor on the scores.
    """

    kernel: Kernel
    context: Staircase
    own: Staircase | None
    mine: slice
    softmax_scale: float

    def forward(self, rows: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial output and its log-sum-exp.

        Shape:
            rows ``[A, n_q, d]``, keys ``[S_p, n_kv, d]`` and ``[Q_p, n_kv, d]`` ->
            ``[A, n_q, d]``, ``[A, n_q]``, in the accumulator dtype.
        """
        with torch.autocast(rows.device.type, enabled=False):
            return self._forward(rows, keys)

    def _forward(self, rows: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        context_k, context_v, own_k, own_v = keys
        scale, mine = self.softmax_scale, self.mine
        out, lse = self.kernel.forward(rows, context_k, context_v, self.context, scale)
        if self.own is not None and own_k is not None and own_v is not None:
            own_out, own_lse = self.kernel.forward(rows[mine], own_k, own_v, self.own, scale)
            merge_(out[mine], lse[mine], own_out, own_lse)
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        rows: torch.Tensor,
        keys: Keys,
        delta: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Gradients, from what all ranks together know of the rows.

        Args:
            grad_out: gradient of the whole output.
            rows: the queries.
            keys: as in `forward`.
            delta: rowsum of `grad_out` and the whole output.
            lse: log-sum-exp over the keys of all ranks.

        Returns:
            dq of the attended rows, partial, in the accumulator dtype; dk and dv of all keys,
            complete.
        """
        with torch.autocast(rows.device.type, enabled=False):
            return self._backward(grad_out, rows, keys, delta, lse)

    def _backward(
        self,
        grad_out: torch.Tensor,
        rows: torch.Tensor,
        keys: Keys,
        delta: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        context_k, context_v, own_k, own_v = keys
        scale, mine = self.softmax_scale, self.mine
        carrier = delta_carrier(grad_out, delta)
        grad_rows, grad_context_k, grad_context_v = self.kernel.backward(
            grad_out, rows, context_k, context_v, carrier, lse, self.context, scale
        )
        if self.own is None or own_k is None or own_v is None:
            return grad_rows, grad_context_k, grad_context_v, None, None
        own_grad_q, grad_own_k, grad_own_v = self.kernel.backward(
            grad_out[mine], rows[mine], own_k, own_v, carrier[mine], lse[mine], self.own, scale
        )
        grad_rows[mine] += own_grad_q
        return grad_rows, grad_context_k, grad_context_v, grad_own_k, grad_own_v
