"""The masked corners of a staircase as batched matrix products, on any device.

Fused kernels without custom masks compute the dense levels; the leaves between them are small, many
and ragged. Here they are gathered into padded batches of similar shape, whose scores are made in
full: at 128 rows a leaf that is about 1 % of all pairs at several times the price of a fused
kernel's, and the memory of a batch is bounded. Products take the dtype of the inputs and are added
up in fp32, as fused kernels do; scores and softmax are fp32 (fp64 for fp64 inputs).

Shape legend: T leaves of a batch, m query rows and n keys of the largest, n_q and n_kv heads,
g = n_q / n_kv, d head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels.packed_rows import (
    PackedRows,
    on_device,
    similar_shapes,
    visible_keys,
)
from megatron_splitkv.attention.merge import accumulator_dtype, finite_or_zero, row_delta
from megatron_splitkv.plan import Rectangles, Staircase

# Bound on the fp32 scores of a batch, of which the backward holds about four; a leaf is never cut.
_SCORE_BYTES = 128 * 1024 * 1024


def forward_leaves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    staircase: Staircase,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge the attention of all leaves into `out` and `lse`, in place.

    Args:
        q: queries.
        k: local keys.
        v: their values.
        staircase: whose leaves.
        softmax_scale: factor on the scores.
        out: partial output over other keys, in the accumulator dtype.
        lse: its log-sum-exp.

    Shape:
        q, out ``[Q, n_q, d]``, k, v ``[K, n_kv, d]``, lse ``[Q, n_q]``.
    """
    num_groups = k.shape[1]
    for batch in _batches_of(staircase, q.device, q.shape[1]):
        scores = batch.scores(batch.rows(q, num_groups), batch.keys(k), softmax_scale)
        leaf_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = scores.sub_(finite_or_zero(leaf_lse)).exp_()
        leaf_out = _product(weights.to(v.dtype), batch.keys(v))
        batch.q.merge_into(
            out,
            lse,
            _by_head(leaf_out, num_groups, q.shape[1]),
            _by_head(leaf_lse, num_groups, q.shape[1]).squeeze(-1),
        )


def backward_leaves(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_carrier: torch.Tensor,
    lse: torch.Tensor,
    staircase: Staircase,
    softmax_scale: float,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> None:
    """Add the gradients through all leaves to the three accumulators, in place.

    Args:
        grad_out: gradient of the whole output.
        q: queries.
        k: local keys.
        v: their values.
        out_carrier: any tensor whose rowsum with `grad_out` is that of the whole output.
        lse: log-sum-exp over all keys.
        staircase: whose leaves.
        softmax_scale: factor on the scores.
        grad_q: in the accumulator dtype.
        grad_k: likewise.
        grad_v: likewise.

    Shape:
        grad_out, q, out_carrier, grad_q ``[Q, n_q, d]``, k, v, grad_k, grad_v ``[K, n_kv, d]``,
        lse ``[Q, n_q]``.
    """
    num_groups, num_heads = k.shape[1], q.shape[1]
    row_lse = finite_or_zero(lse).unsqueeze(-1)
    for batch in _batches_of(staircase, q.device, num_heads):
        leaf_q, leaf_grad_out, leaf_carrier, leaf_lse = (
            batch.rows(x, num_groups) for x in (q, grad_out, out_carrier, row_lse)
        )
        leaf_k, leaf_v = batch.keys(k), batch.keys(v)
        leaf_grad_out = leaf_grad_out.to(v.dtype)
        weights = batch.scores(leaf_q, leaf_k, softmax_scale).sub_(leaf_lse).exp_()
        leaf_grad_v = _product(weights.to(v.dtype).mT, leaf_grad_out)
        grad_weights = _product(leaf_grad_out, leaf_v.mT)
        delta = row_delta(leaf_grad_out, leaf_carrier).unsqueeze(-1)
        grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(softmax_scale).to(q.dtype)
        leaf_grad_q = _product(grad_scores, leaf_k)
        leaf_grad_k = _product(grad_scores.mT, leaf_q)
        batch.q.add_into(grad_q, _by_head(leaf_grad_q, num_groups, num_heads))
        batch.k.add_into(grad_k, leaf_grad_k.unflatten(0, (-1, num_groups)))
        batch.k.add_into(grad_v, leaf_grad_v.unflatten(0, (-1, num_groups)))


@dataclass(frozen=True)
class _LeafBatch:
    """Leaves of similar shape that share no query row.

    Rows and keys that take no part in a leaf may hold NaN, which a weight of 0 does not silence:
    they are read as 0 where there are any.

    Args:
        q: their query rows.
        k: their keys.
        visible: range of each row's visible keys, from the leaf's first; empty for padding.
        blind_rows: rows that see none of the leaf's keys; None if every row that is not padding
            sees some.
        unseen_keys: keys that no row of the leaf sees; None likewise.

    Shape:
        visible int64[T, m, 2], blind_rows bool[T, m], unseen_keys bool[T, n].
    """

    q: PackedRows
    k: PackedRows
    visible: torch.Tensor
    blind_rows: torch.Tensor | None
    unseen_keys: torch.Tensor | None

    def rows(self, x: torch.Tensor, num_groups: int) -> torch.Tensor:
        """``[Q, n_q, d]`` -> ``[T * n_kv, g * m, d]``."""
        rows = self.q.gather(x)
        if self.blind_rows is not None:
            rows = rows.masked_fill(self.blind_rows[:, None, :, None], 0.0)
        return rows.reshape(rows.shape[0] * num_groups, -1, rows.shape[-1])

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[K, n_kv, d]`` -> ``[T * n_kv, n, d]``."""
        keys = self.k.gather(x)
        if self.unseen_keys is not None:
            keys = keys.masked_fill(self.unseen_keys[:, None, :, None], 0.0)
        return keys.flatten(0, 1)

    def scores(self, rows: torch.Tensor, keys: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Scaled scores of `rows` and `keys`, -inf where a key is not visible.

        Shape:
            ``[T * n_kv, g * m, d]``, ``[T * n_kv, n, d]`` -> ``[T * n_kv, g * m, n]``.
        """
        scores = _product(rows, keys.mT).mul_(softmax_scale)
        start, end = self.visible.unsqueeze(-2).unbind(-1)  # [T, m, 1]
        key = torch.arange(keys.shape[1], device=keys.device)
        hidden = (key < start) | (key >= end)
        num_leaves, num_rows = start.shape[:2]
        by_leaf = scores.unflatten(0, (num_leaves, -1)).unflatten(2, (-1, num_rows))
        by_leaf.masked_fill_(hidden[:, None, None], -torch.inf)
        return scores


def _by_head(x: torch.Tensor, num_groups: int, num_heads: int) -> torch.Tensor:
    """``[T * n_kv, g * m, d]`` -> ``[T, n_q, m, d]``."""
    grouped = x.unflatten(0, (-1, num_groups)).unflatten(2, (num_heads // num_groups, -1))
    return grouped.flatten(1, 2)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product of low-precision matrices, added up and returned in fp32 (fp64 for fp64)."""
    dtype = accumulator_dtype(a.dtype)
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))  # the CPU has no product of mixed dtypes


# Every layer and both directions walk the same leaves; they are laid out and copied once.
_BATCHES: WeakKeyDictionary[Staircase, dict[tuple[torch.device, int], list[_LeafBatch]]] = (
    WeakKeyDictionary()
)


def _batches_of(staircase: Staircase, device: torch.device, num_heads: int) -> list[_LeafBatch]:
    made = _BATCHES.setdefault(staircase, {})
    key = (device, num_heads)
    if key not in made:
        made[key] = [
            _lay_out(leaves, chosen, staircase, device)
            for leaves in staircase.leaves.disjoint()
            for chosen in _groups(leaves, staircase.block_size, num_heads)
        ]
    return made[key]


def _groups(leaves: Rectangles, block_size: int, num_heads: int) -> Iterator[NDArray[np.int64]]:
    """Leaves of a batch each: of similar shape, and within the bound on the scores."""
    rows = (leaves.q_end - leaves.q_start) * block_size
    keys = leaves.k_end - leaves.k_start
    # On a GPU a batch costs its launches; padding up to an octave costs less.
    for group in similar_shapes(rows, keys, np.flatnonzero(rows * keys > 0), per_octave=1):
        leaf_bytes = 4 * num_heads * int(rows[group].max()) * int(keys[group].max())
        most = max(1, _SCORE_BYTES // leaf_bytes)
        yield from np.array_split(group, -(-group.size // most))


def _lay_out(
    leaves: Rectangles, chosen: NDArray[np.int64], staircase: Staircase, device: torch.device
) -> _LeafBatch:
    size = staircase.block_size
    q_start, k_start = leaves.q_start[chosen] * size, leaves.k_start[chosen]
    rows, keys = leaves.q_end[chosen] * size - q_start, leaves.k_end[chosen] - k_start
    visible = visible_keys(leaves, chosen, staircase, masked=True)
    start, end = visible[..., 0], visible[..., 1]
    blind = start >= end
    # How many rows see each key: +1 where a row's range begins, -1 where it ends.
    edges = np.zeros((chosen.size, int(keys.max()) + 1), dtype=np.int64)
    leaf, _ = sees = np.nonzero(~blind)
    np.add.at(edges, (leaf, start[sees]), 1)
    np.add.at(edges, (leaf, end[sees]), -1)
    unseen = np.cumsum(edges[:, :-1], axis=1) == 0
    # Padding repeats the first row of its range, so it needs care only if that one does.
    is_row = np.arange(rows.max()) < rows[:, None]
    is_key = np.arange(keys.max()) < keys[:, None]
    return _LeafBatch(
        q=PackedRows.of(q_start, rows, device),
        k=PackedRows.of(k_start, keys, device),
        visible=on_device(visible, device),
        blind_rows=on_device(blind, device) if (blind & is_row).any() else None,
        unseen_keys=on_device(unseen, device) if (unseen & is_key).any() else None,
    )
