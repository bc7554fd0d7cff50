"""Rotary embedding by explicit positions, so that a row's phase is its own wherever the row lives.

Angles come from the positions of the batch, in fp32 as the target and the serving engines compute
them. There is no table, hence none that can be too short or belong to another rank's rows.
"""

from typing import Any

import torch


def rotary_cos_sin(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Return cosines and sines of every row, in one tensor.

    One tensor, because Megatron's recomputation saves tensors and reads a pair as something else.

    Args:
        positions: position inside the document of every row.
        head_dim: width of a head.
        theta: base of the frequencies.

    Shape:
        ``positions`` int64 ``[rows]``; the result fp32 ``[rows, head_dim]``: cosines of all
        head_dim / 2 frequencies, then sines.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of every head by the row's angles.

    Computed in fp32; nothing of `x` is kept for the backward pass, which rotates back.

    Args:
        x: queries or keys.
        cos_sin: what `rotary_cos_sin` returned for the rows of `x`.

    Shape:
        ``x [rows, b, heads, head_dim]``, ``cos_sin [rows, head_dim]``; the result like ``x``.
    """
    return _Rotary.apply(x, cos_sin)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_sin)
        cos, sin = cos_sin[:, None, None, :].chunk(2, dim=-1)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        cos, sin = cos_sin[:, None, None, :].chunk(2, dim=-1)
        return _rotate(grad_outputs[0], cos, -sin), None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
