"""Partial attention on Transformer Engine's fused attention (cuDNN): one THD call a level.

`fused_attn_fwd` and `fused_attn_bwd` are called directly: they take ranges of rows by their starts,
and a log-sum-exp and an output of the whole softmax in the backward. What they promise and what
not is kept here:

* A range's rows are read in place, q, k and v are never copied or repeated.
* Rows in no range: the output is 0 but the statistics are uninitialised memory, so they are
  overwritten before anything is merged.
* A call returns dq, dk and dv in the dtype of its inputs. Query and key ranges of different levels
  overlap, so all three add up in fp32 and are rounded once.
* Masked corners are too small and too many for it; `leaves` computes them.

Determinism: the forward always is. The backward adds dq atomically and is not, unless
`torch.use_deterministic_algorithms` asks for it; Transformer Engine then has it deterministic at a
price, and on Hopper with cuDNN before 9.25 at a workspace quadratic in the rows (see `selection`).

Until a device has run it: tested against the contract of the two functions, not on a GPU.

Source: the calls follow what Transformer Engine's own ring attention passes
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py).
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron_splitkv.attention.kernels.leaves import backward_leaves, forward_leaves
from megatron_splitkv.attention.kernels.thd import (
    TILE_LEAF_LIMITS,
    ThdCall,
    ThdCalls,
    thd_calls,
)
from megatron_splitkv.attention.merge import accumulator_dtype, finite_or_zero, merge_
from megatron_splitkv.compat import FusedAttention
from megatron_splitkv.plan import LeafLimits, Staircase


@dataclass(frozen=True)
class TeKernel:
    """The kernel around one pair of fused functions; see `Kernel`.

    Args:
        fused: the functions.
        zero_unused_rows: hand them copies with 0 in rows that see or are seen by nothing. For
            engines that multiply what lies behind a range by 0 (0 * NaN is NaN); without such rows
            nothing is copied.
    """

    fused: FusedAttention
    zero_unused_rows: bool = False

    LEAF_LIMITS: ClassVar[LeafLimits] = TILE_LEAF_LIMITS

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staircase: Staircase,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        dtype = accumulator_dtype(q.dtype)
        out = q.new_zeros(q.shape, dtype=dtype)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
        calls = thd_calls(staircase, k.shape[0], q.device)
        ready_q = q.contiguous()  # a query row takes part in no other row's output
        ready_k, ready_v = (self._ready(x, calls.unseen_kv) for x in (k, v))
        for call in calls.calls:
            call_out, (statistics, *_) = self.fused.forward(
                q=ready_q,
                k=ready_k,
                v=ready_v,
                rng_gen=_unused_generator(q.device),
                **_shared(q, call, calls, softmax_scale),
            )
            call_lse = statistics.view(lse.shape).to(dtype)
            call_lse = torch.where(call.covered.unsqueeze(-1), call_lse, -torch.inf)
            merge_(out, lse, call_out, call_lse)
        forward_leaves(q, k, v, staircase, softmax_scale, out, lse)
        return out, lse

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
        """See `Kernel.backward`."""
        dtype = accumulator_dtype(q.dtype)
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
        calls = thd_calls(staircase, k.shape[0], q.device)
        ready_q, ready_grad_out, ready_out = (
            self._ready(x.to(q.dtype), calls.blind_q) for x in (q, grad_out, out_carrier)
        )
        ready_k, ready_v = (self._ready(x, calls.unseen_kv) for x in (k, v))
        statistics = finite_or_zero(lse).unsqueeze(-1).contiguous()
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)  # dropout is 0: not read
        for call in calls.calls:
            call_grad_q, call_grad_k, call_grad_v, *_ = self.fused.backward(
                q=ready_q,
                k=ready_k,
                v=ready_v,
                o=ready_out,
                d_o=ready_grad_out,
                aux_ctx_tensors=[statistics, rng_state],
                deterministic=torch.are_deterministic_algorithms_enabled(),
                **_shared(q, call, calls, softmax_scale),
            )
            grad_q += call_grad_q
            grad_k += call_grad_k
            grad_v += call_grad_v
        backward_leaves(
            grad_out, q, k, v, out_carrier, lse, staircase, softmax_scale, grad_q, grad_k, grad_v
        )
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _ready(self, x: torch.Tensor, unused: torch.Tensor | None) -> torch.Tensor:
        """`x` as the functions want it; a copy only if its rows have gaps or must be blanked."""
        if self.zero_unused_rows and unused is not None:
            x = x.masked_fill(unused[:, None, None], 0.0)
        return x.contiguous()


@functools.cache
def _unused_generator(device: torch.device) -> torch.Generator:
    """Advanced by every forward, with no dropout too; the default one is the model's."""
    return torch.Generator(device)


def _shared(
    q: torch.Tensor, call: ThdCall, calls: ThdCalls, softmax_scale: float
) -> dict[str, Any]:
    """What both directions of a level are called with."""
    return {
        "max_seqlen_q": calls.max_seqlen_q,
        "max_seqlen_kv": calls.max_seqlen_kv,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_kv": call.cu_seqlens_kv,
        "cu_seqlens_q_padded": call.starts_q,
        "cu_seqlens_kv_padded": call.starts_kv,
        "fake_dtype": q.dtype,
        "attn_scale": softmax_scale,
    }
