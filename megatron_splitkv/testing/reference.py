"""Attention of draft blocks written down directly: one process, dense mask, autograd.

The ground truth of every test. Slow and large on purpose; it shares no code with the fast paths.

Shape legend: N blocks, B block size, Q = N * B query rows, S context rows, n_q and n_kv heads,
d head width. Rows are global: blocks in layout order, context rows by packed position.
"""

import math

import torch

from megatron_splitkv.data.anchors import BlockLayout


def visibility_mask(
    layout: BlockLayout, context_length: int, window: int | None = None
) -> torch.Tensor:
    """Which key each query row sees.

    A kept block sees the context of its own document strictly before its anchor, and all of its own
    rows; a padding block sees nothing, not even itself. With a window, a query at position p
    (anchor + slot) sees of these only the keys at positions x <= p with p - x < window, which makes
    its own block causal.

    Args:
        layout: blocks in global packed positions.
        context_length: S.
        window: of a sliding-window layer; None for full attention.

    Returns:
        bool ``[Q, S + Q]``, context keys first.
    """
    rows = layout.block_size
    start, anchor, keep = (
        torch.as_tensor(x).repeat_interleave(rows)
        for x in (layout.document_starts, layout.anchor_positions, layout.block_keep_mask)
    )
    block = torch.arange(layout.num_blocks).repeat_interleave(rows)
    position = anchor + torch.arange(rows).repeat(layout.num_blocks)
    key = torch.arange(context_length)
    context = (start[:, None] <= key) & (key < anchor[:, None])
    own = block[:, None] == block
    mask = torch.cat([context, own], dim=1) & keep[:, None]
    if window is not None:
        distance = position[:, None] - torch.cat([key, position])
        mask &= (distance >= 0) & (distance < window)
    return mask


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    *,
    window: int | None = None,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64 with an explicit score matrix, differentiable by autograd.

    Args:
        q: query rows of all blocks, any floating dtype.
        k: context keys, then the blocks' own keys.
        v: values in the order of `k`.
        layout: the blocks.
        window: see `visibility_mask`.
        softmax_scale: factor on the scores; ``1 / sqrt(d)`` if None.

    Returns:
        Output and log-sum-exp (natural log), fp64. A row that sees nothing has output 0, gradient
        0 and log-sum-exp -inf.

    Shape:
        q ``[Q, n_q, d]``, k and v ``[S + Q, n_kv, d]`` -> ``[Q, n_q, d]``, ``[Q, n_q]``.
    """
    num_queries, num_heads, width = q.shape
    group = num_heads // k.shape[1]
    scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
    mask = visibility_mask(layout, k.shape[0] - num_queries, window)[:, None, :]  # [Q, 1, S + Q]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q.double(), keys) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    sees_something = mask.any(dim=-1)  # [Q, 1]
    # A row of -inf alone has a NaN gradient through logsumexp: give it scores of 0, then mask.
    lse = torch.logsumexp(scores.masked_fill(~sees_something[..., None], 0.0), dim=-1)
    probabilities = torch.exp(scores - lse[..., None])
    out = torch.einsum("qhk,khd->qhd", probabilities, values)
    return out, lse.masked_fill(~sees_something, -math.inf)


def dense_sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    *,
    window: int | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The same attention in the precision of its inputs: torch's SDPA with a dense mask.

    What a user without this package would call: the measure for low-precision error (an error of
    at most twice this one's is accepted) and for time.

    Args:
        q: query rows of all blocks.
        k: context keys, then the blocks' own keys.
        v: values in the order of `k`.
        layout: the blocks.
        window: see `visibility_mask`.
        softmax_scale: factor on the scores; ``1 / sqrt(d)`` if None.

    Shape:
        As `reference_attention`.
    """
    mask = visibility_mask(layout, k.shape[0] - q.shape[0], window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask | ~mask.any(dim=1, keepdim=True),  # SDPA has no answer for empty rows
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1) * mask.any(dim=1)[:, None, None]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in fp64; infinite if any is not finite.

    Where `expected` is zero everywhere the norm of `actual` itself is returned.
    """
    difference = float((actual.detach().double() - expected.detach().double()).norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / (float(expected.detach().double().norm()) or 1.0)
