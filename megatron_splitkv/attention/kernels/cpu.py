"""Partial attention on torch's CPU flash attention: dense tiles, masked leaves, no score matrix.

The aten operation takes the log-sum-exp and output of the whole softmax in its backward and reads
grouped key heads without repeating them. Its traps are kept here: it dies on empty inputs (no tile
is empty); it reports lse 0 for rows that see nothing; and in bf16 and fp16 it adds dk and dv of
grouped heads in that dtype and is many times slower backward on most CPUs, so that those tiles, and
only they, one at a time, are computed in fp32.
"""

import torch

from megatron_splitkv.attention.kernels.cpu_tiles import Tile, tiles_of
from megatron_splitkv.attention.merge import accumulator_dtype, finite_or_zero
from megatron_splitkv.plan import LeafLimits, Staircase

# Measured: here the arithmetic that a further cut saves is worth its calls and merges. The optimum
# is flat: half or twice either limit costs 1 to 3 %.
LEAF_LIMITS = LeafLimits(rows=32, pairs=8 * 1024)

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    staircase: Staircase,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernel.forward`."""
    q, k, v = _head_rows(q), _head_rows(k), _head_rows(v)
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
    for tile in tiles_of(staircase):
        tile.merge_out(out, lse, *_attend(tile, q, k, v, dtype, softmax_scale))
    return out, lse


def backward(
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
    grad_out, q, k, v, out_carrier = map(_head_rows, (grad_out, q, k, v, out_carrier))
    dtype = accumulator_dtype(q.dtype)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    row_lse = finite_or_zero(lse).unsqueeze(-1)
    for tile in tiles_of(staircase):
        # A list that empties: nothing of a tile is alive when the next one is computed.
        grads = list(
            _flash_backward(
                tile.queries(grad_out).to(dtype),
                tile.queries(q).to(dtype),
                tile.keys(k).to(dtype),
                tile.keys(v).to(dtype),
                tile.queries(out_carrier).to(dtype),
                tile.queries(row_lse).squeeze(-1),
                0.0,  # dropout
                False,  # causal
                attn_mask=_additive_mask(tile, dtype),
                scale=softmax_scale,
            )
        )
        tile.add_to_keys(grad_v, grads.pop())
        tile.add_to_keys(grad_k, grads.pop())
        tile.add_to_queries(grad_q, grads.pop())
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _attend(
    tile: Tile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, h, m, d]`` and log-sum-exp ``[T, h, m]`` of one tile."""
    out, lse = _flash_forward(
        tile.queries(q).to(dtype),
        tile.keys(k).to(dtype),
        tile.keys(v).to(dtype),
        attn_mask=_additive_mask(tile, dtype),
        scale=softmax_scale,
    )
    if tile.visible is not None:
        start, end = tile.visible.unbind(-1)
        lse = lse.masked_fill((start >= end)[:, None], -torch.inf)
    return out, lse


def _head_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with adjacent elements along the head width, which the operation takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive_mask(tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive mask ``[T, 1, m, n]`` of a tile; None if every row sees all keys."""
    if tile.visible is None:
        return None
    start, end = tile.visible[:, None].split(1, dim=-1)
    key = torch.arange(tile.num_keys)
    hidden = (key < start) | (key >= end)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
