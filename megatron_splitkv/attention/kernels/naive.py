"""Partial attention with an explicit local mask and explicit scores: the twin of every kernel.

Runs on any device in O(Q K) memory. It reads only the visible ranges of the staircase, not its
rectangles, so it also checks how those were cut.
"""

import torch

from megatron_splitkv.attention.merge import accumulator_dtype, finite_or_zero
from megatron_splitkv.plan import LeafLimits, Staircase

LEAF_LIMITS = LeafLimits()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    staircase: Staircase,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernel.forward`."""
    visible = _visible(staircase, k)
    q, k, v = _queries(q, visible, k.shape[1]), _keys(k, visible), _keys(v, visible)
    scores = _scores(q, k, visible, softmax_scale)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - finite_or_zero(lse)[..., None])
    out = torch.einsum("qghk,kgd->qghd", probabilities, v)
    return out.flatten(1, 2), lse.flatten(1, 2)


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
    num_groups, key_dtype = k.shape[1], k.dtype
    visible = _visible(staircase, k)
    grad_out, q, out_carrier = (
        _queries(x, visible, num_groups) for x in (grad_out, q, out_carrier)
    )
    k, v = _keys(k, visible), _keys(v, visible)
    delta = (grad_out * out_carrier).sum(dim=-1)
    row_lse = finite_or_zero(lse).unflatten(1, (num_groups, -1))
    probabilities = torch.exp(_scores(q, k, visible, softmax_scale) - row_lse[..., None])
    grad_v = torch.einsum("qghk,qghd->kgd", probabilities, grad_out)
    grad_probabilities = torch.einsum("qghd,kgd->qghk", grad_out, v)
    grad_scores = probabilities * (grad_probabilities - delta[..., None]) * softmax_scale
    grad_q = torch.einsum("qghk,kgd->qghd", grad_scores, k)
    grad_k = torch.einsum("qghk,qghd->kgd", grad_scores, q)
    return grad_q.flatten(1, 2), grad_k.to(key_dtype), grad_v.to(key_dtype)


def _visible(staircase: Staircase, k: torch.Tensor) -> torch.Tensor:
    """Which local keys each query row sees, bool ``[Q, K]``."""
    start = torch.as_tensor(staircase.row_start, device=k.device)[:, None]
    end = torch.as_tensor(staircase.row_end, device=k.device)[:, None]
    key = torch.arange(k.shape[0], device=k.device)
    return (start <= key) & (key < end)


# Rows that see or are seen by nothing may hold anything, NaN included, and 0 * NaN is NaN.


def _keys(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``[K, n_kv, d]`` in the accumulator dtype, 0 in rows that nothing sees."""
    unseen = ~visible.any(dim=0)[:, None, None]
    return x.to(accumulator_dtype(x.dtype)).masked_fill(unseen, 0.0)


def _queries(x: torch.Tensor, visible: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``[Q, n_q, d]`` -> ``[Q, n_kv, n_q / n_kv, d]`` likewise, 0 in rows that see nothing."""
    blind = ~visible.any(dim=1)[:, None, None]
    return x.to(accumulator_dtype(x.dtype)).masked_fill(blind, 0.0).unflatten(1, (num_groups, -1))


def _scores(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Scaled scores ``[Q, n_kv, n_q / n_kv, K]``, -inf where a key is not visible."""
    scores = torch.einsum("qghd,kgd->qghk", q, k) * softmax_scale
    return scores.masked_fill(~visible[:, None, None, :], -torch.inf)
