"""What every kernel of local attention provides."""

from typing import Protocol

import torch

from megatron_splitkv.plan import LeafLimits, Staircase


class Kernel(Protocol):
    """A kernel: a module or an object with these functions.

    Shape legend: Q = N * B query rows in block order, K local key rows, n_q and n_kv heads
    (n_q a multiple of n_kv; head h reads key head h // (n_q / n_kv)), d head width.
    """

    @property
    def LEAF_LIMITS(self) -> LeafLimits:
        """When a corner of the staircase is cheaper whole and masked than cut further."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staircase: Staircase,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of all queries over these keys.

        Returns:
            Partial output and natural log-sum-exp over these keys, both fp32 (fp64 for fp64
            inputs); exactly 0 and -inf for rows that see none of them.

        Shape:
            q ``[Q, n_q, d]``, k and v ``[K, n_kv, d]`` -> ``[Q, n_q, d]``, ``[Q, n_q]``.
        """
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out_carrier: torch.Tensor,
        lse: torch.Tensor,
        staircase: Staircase,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients through these keys.

        Args:
            grad_out: gradient of the whole output, not of a part.
            q: queries.
            k: these keys.
            v: their values.
            out_carrier: any tensor whose rowsum with `grad_out` is that of the whole output.
            lse: log-sum-exp over all keys, not only these.
            staircase: which of these keys each query row sees.
            softmax_scale: factor on the scores.

        Returns:
            dq, partial over these keys, fp32 (fp64 for fp64 inputs); dk and dv, complete, in the
            dtype of k and v.
        """
        ...
