"""How fast one rank of `splitkv bench step` computes attention: of its share, and at the least."""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.bench.kernel_call import CALLS, smallest_call
from megatron_splitkv.bench.step_rank import Step
from megatron_splitkv.bench.step_shape import Method, StepShape

FLOPS_PER_PAIR = 14  # and head and unit of width: two products forward, five backward


def kernel_flops(shape: StepShape, method: Method, repeats: int = 3) -> float:
    """FLOP/s of the attention kernel of split-KV's share on this rank, by its thread's seconds."""
    step = Step(shape, method)
    plan, rank = step.plan, dist.get_rank()
    dflash, dtype = shape.dflash, step.features.dtype
    heads, width = dflash.num_attention_heads, dflash.head_dim
    q = torch.randn(plan.num_blocks * plan.block_size, heads, width).to(dtype)
    k = torch.randn(plan.num_rows(rank), dflash.num_key_value_heads, width).to(dtype)
    kernel = select_kernel("auto", q, k.shape[1])
    staircase = plan.staircase(rank, kernel.LEAF_LIMITS)

    def call() -> None:
        out, lse = kernel.forward(q, k, k, staircase, width**-0.5)
        kernel.backward(q, q, k, k, out.to(dtype), lse, staircase, width**-0.5)

    pairs = staircase.needed_pairs * heads * width
    return FLOPS_PER_PAIR * pairs / _seconds(call, repeats)


def call_seconds(shape: StepShape, repeats: int = 15) -> float:
    """Of a call of the attention kernel and the merge of its result, by this rank's thread."""
    dflash, device = shape.dflash, torch.device("cpu")
    heads, kv_heads = dflash.num_attention_heads, dflash.num_key_value_heads
    dtype = torch.bfloat16 if shape.dtype == "bfloat16" else torch.float32
    call = smallest_call(heads, kv_heads, dflash.head_dim, dtype, device)
    return _seconds(call, repeats) / CALLS


def _seconds(call: Callable[[], None], repeats: int) -> float:
    """Median after a first call."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.thread_time()
        call()
        seconds.append(time.thread_time() - begin)
    return float(np.median(seconds[1:]))
