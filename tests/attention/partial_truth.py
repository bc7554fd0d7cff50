"""The truth about a part of an attention: fp64, dense masks, autograd."""

from typing import NamedTuple

import numpy as np
import torch

from megatron_splitkv.plan import Rectangles, Staircase


class Part(NamedTuple):
    """Attention over some pairs, and gradients through them when all pairs take part."""

    out: torch.Tensor  # over the part
    lse: torch.Tensor
    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_v: torch.Tensor
    whole_out: torch.Tensor  # over all pairs
    whole_lse: torch.Tensor


def partial_truth(q, k, v, grad_out, part, whole, scale):
    """`part` of `whole`, bool [Q, K] masks; NaN in rows that nothing sees must be cut off before.

    Every input has two copies, one read by the pairs of the part and one by the others, so that
    autograd tells their gradients apart.
    """
    group = q.shape[1] // k.shape[1]
    ours = [x.double().clone().requires_grad_() for x in (q, k, v)]
    others = [x.double() for x in (q, k, v)]
    part, rest = part[:, None], (whole & ~part)[:, None]
    scores = torch.cat(
        [
            torch.einsum("qhd,khd->qhk", a, b.repeat_interleave(group, 1))
            .mul(scale)
            .masked_fill(~mask, -torch.inf)
            for (a, b, _), mask in ((ours, part), (others, rest))
        ],
        dim=-1,
    )
    blind = ~whole.any(1)[:, None]
    whole_lse = scores.masked_fill(blind[..., None], 0.0).logsumexp(-1)
    values = torch.cat([ours[2], others[2]]).repeat_interleave(group, 1)
    whole_out = torch.einsum("qhk,khd->qhd", (scores - whole_lse[..., None]).exp(), values)
    grads = torch.autograd.grad(whole_out, ours, grad_out.double())
    ours_scores = scores[..., : k.shape[0]].detach()
    lse = ours_scores.logsumexp(-1)
    weights = (ours_scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    out = torch.einsum("qhk,khd->qhd", weights, v.double().repeat_interleave(group, 1))
    whole_lse = whole_lse.detach().masked_fill(blind, -torch.inf)
    return Part(out, lse, *grads, whole_out.detach(), whole_lse)


def visible_mask(staircase, num_keys):
    """bool [Q, K]: the row ranges, one comparison per pair."""
    key = np.arange(num_keys)
    return torch.from_numpy(
        (staircase.row_start[:, None] <= key) & (key < staircase.row_end[:, None])
    )


def leaf_mask(staircase, num_keys):
    """bool [Q, K]: the pairs that the leaves compute."""
    inside = torch.zeros(staircase.num_rows, num_keys, dtype=torch.bool)
    leaves = staircase.leaves
    for q0, q1, k0, k1 in zip(
        leaves.q_start, leaves.q_end, leaves.k_start, leaves.k_end, strict=True
    ):
        inside[q0 * staircase.block_size : q1 * staircase.block_size, k0:k1] = True
    return inside & visible_mask(staircase, num_keys)


def rectangles(*rows):
    """Rectangles from (q_start, q_end, k_start, k_end) each."""
    return Rectangles(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def staircase_of(levels, leaves, row_start, row_end, block_size):
    """A hand-made staircase; what it executes is not counted."""
    row_start, row_end = (np.asarray(x, dtype=np.int64) for x in (row_start, row_end))
    needed_pairs = int((row_end - row_start).sum())
    return Staircase(levels, leaves, row_start, row_end, block_size, needed_pairs, 0)


def inputs(num_rows, num_keys, num_heads, num_key_heads, width=8, dtype=torch.float64, seed=0):
    """q, k, v, grad_out, exactly representable in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, num_heads), (num_keys, num_key_heads)]
    return [
        torch.randn(rows, heads, width, dtype=torch.float64, generator=generator).to(dtype)
        for rows, heads in (shapes[0], shapes[1], shapes[1], shapes[0])
    ]
