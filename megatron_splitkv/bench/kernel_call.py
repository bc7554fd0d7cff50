"""What a call of the attention kernel takes before it computes anything worth mentioning."""

from collections.abc import Callable

import numpy as np
import torch

from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.attention.merge import accumulator_dtype, merge_
from megatron_splitkv.plan import build_staircase

CALLS = 2  # forward and backward


def smallest_call(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """One block that sees one key: forward, backward, and the merge of both results.

    Args:
        heads: n_q.
        kv_heads: n_kv.
        width: d.
        dtype: of queries, keys and values.
        device: theirs.

    Returns:
        `CALLS` calls of the kernel that `auto` selects, each with what a strategy does to its
        result before the next one.
    """
    block = 16
    q = torch.randn(block, heads, width, device=device).to(dtype)
    k = torch.randn(1, kv_heads, width, device=device).to(dtype)
    kernel, scale = select_kernel("auto", q, kv_heads), width**-0.5
    nothing, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    staircase = build_staircase(nothing, one, block, kernel.LEAF_LIMITS)
    sums = [torch.zeros_like(x, dtype=accumulator_dtype(dtype)) for x in (q, k, k)]

    def call() -> None:
        out, lse = kernel.forward(q, k, k, staircase, scale)
        total = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        merge_(*total, out, lse)
        gradients = kernel.backward(q, q, k, k, out.to(dtype), lse, staircase, scale)
        for gradient_sum, gradient in zip(sums, gradients, strict=True):
            gradient_sum.add_(gradient)

    return call
