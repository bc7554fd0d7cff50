"""Partial attention on torch's FlexAttention: the kernel of the paper, to compare with.

Its block mask is made from the row ranges of the staircase, tile by tile: never a mask of all
pairs. The rectangles of the staircase are not used. What it costs, to compare fairly:

* Key lengths are rounded up to a multiple of 4096, so that plans of about one length share a
  compiled kernel. The operation takes no length besides the tensors', so k and v are copied for it,
  padded with 0. The copy also clears rows that nothing sees, which may hold NaN. Only k and v that
  need neither are read in place.
* The operation's backward knows only its own softmax. The gradient of the whole passes through a
  part by its output and its log-sum-exp: dO_p = exp(lse_p - lse) dO and dlse_p = exp(lse_p - lse)
  (rowsum(dO * O_p) - delta). O_p is not kept, so the backward computes the forward again.
* Compilation takes part of a minute for each new shape, once a process.

Not on CPUs, where the operation has no backward.

Shape legend: Q query rows, K local key rows, K' >= K after rounding, n_q and n_kv heads, d width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels.packed_rows import on_device
from megatron_splitkv.attention.kernels.thd import check_row_count
from megatron_splitkv.attention.merge import accumulator_dtype, row_delta, softmax_weight
from megatron_splitkv.plan import LeafLimits, Staircase

LEAF_LIMITS = LeafLimits()

_TILE = 128
_KEY_MULTIPLE = 4096


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    staircase: Staircase,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernel.forward`."""
    dtype = accumulator_dtype(q.dtype)
    if staircase.needed_pairs == 0:
        return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
    view = _view_of(staircase, k.shape[0], q.device)
    with torch.no_grad():
        out, lse = _flex_attention()(
            view.queries(q), view.keys(k), view.keys(v), view.block_mask, softmax_scale
        )
    return view.rows(out).to(dtype), view.row_lse(lse).to(dtype)


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
    dtype = accumulator_dtype(q.dtype)
    if staircase.needed_pairs == 0:
        return q.new_zeros(q.shape, dtype=dtype), torch.zeros_like(k), torch.zeros_like(v)
    view = _view_of(staircase, k.shape[0], q.device)
    inputs = [x.detach().requires_grad_() for x in (view.queries(q), view.keys(k), view.keys(v))]
    with torch.enable_grad():
        part_out, part_lse = _flex_attention()(*inputs, view.block_mask, softmax_scale)
    rows = view.rows(view.queries(grad_out))
    weight = softmax_weight(view.row_lse(part_lse.detach()).to(dtype), lse)
    grad_part = (rows * weight.unsqueeze(-1)).to(q.dtype)
    delta = row_delta(rows, view.rows(view.queries(out_carrier)))
    # From the rounded gradient, as the operation will: its own delta then cancels exactly.
    grad_lse = row_delta(grad_part, view.rows(part_out.detach())) - weight * delta
    grad_q, grad_k, grad_v = torch.autograd.grad(
        (part_out, part_lse),
        inputs,
        (grad_part.transpose(0, 1)[None], grad_lse.T[None].to(part_lse.dtype)),
    )
    num_keys = k.shape[0]
    return view.rows(grad_q).to(dtype), view.rows(grad_k)[:num_keys], view.rows(grad_v)[:num_keys]


@functools.cache
def _flex_attention() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`_uncompiled`, compiled."""
    return torch.compile(_uncompiled())


def _uncompiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operation: ``(q, k, v, block_mask, scale)`` -> out, natural lse."""
    flex_attention = compat.flex_attention_with_lse()

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flex_attention(
            q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    return attend


@dataclass(frozen=True)
class _View:
    """Tensors and masks as the operation wants them: heads before rows, a batch of one.

    Args:
        block_mask: of the staircase, for Q x K'.
        num_keys: K'.
        blind_rows: query rows that see nothing; None if there are none.
        unseen_keys: key rows, padding included, that nothing sees; None if there are none.

    Shape:
        blind_rows bool[Q], unseen_keys bool[K'].
    """

    block_mask: BlockMask
    num_keys: int
    blind_rows: torch.Tensor | None
    unseen_keys: torch.Tensor | None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[Q, n_q, d]`` -> ``[1, n_q, Q, d]``, 0 where a row sees nothing."""
        if self.blind_rows is not None:
            x = x.masked_fill(self.blind_rows[:, None, None], 0.0)
        return x.transpose(0, 1)[None]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[K, n_kv, d]`` -> ``[1, n_kv, K', d]``, 0 where nothing sees a row."""
        if self.unseen_keys is not None:
            padded = x.new_empty((self.num_keys, *x.shape[1:]))
            padded[: x.shape[0]] = x
            x = padded.masked_fill_(self.unseen_keys[:, None, None], 0.0)
        return x.transpose(0, 1)[None]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, h, rows, d]`` -> ``[rows, h, d]``."""
        return x[0].transpose(0, 1)

    def row_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """``[1, n_q, Q]`` -> ``[Q, n_q]``, -inf where a row sees nothing."""
        rows = lse[0].T
        if self.blind_rows is not None:
            rows = rows.masked_fill(self.blind_rows[:, None], -torch.inf)
        return rows


# Every layer and both directions have the same mask; it is made and copied once.
_VIEWS: WeakKeyDictionary[Staircase, dict[torch.device, _View]] = WeakKeyDictionary()


def _view_of(staircase: Staircase, num_keys: int, device: torch.device) -> _View:
    made = _VIEWS.setdefault(staircase, {})
    if device not in made:
        rounded = -(-num_keys // _KEY_MULTIPLE) * _KEY_MULTIPLE
        check_row_count(staircase.num_rows, rounded)
        start, end = staircase.row_start, staircase.row_end
        blind = start >= end
        unseen = _count_inside(start[~blind], end[~blind], rounded) == 0
        made[device] = _View(
            block_mask=_block_mask(start, end, rounded, device),
            num_keys=rounded,
            blind_rows=on_device(blind, device) if blind.any() else None,
            unseen_keys=on_device(unseen, device) if unseen.any() else None,
        )
    return made[device]


def _count_inside(
    start: NDArray[np.int64], end: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """In how many of the ranges each position lies, int64[length]."""
    edges = np.bincount(start, minlength=length + 1) - np.bincount(end, minlength=length + 1)
    return np.cumsum(edges)[:length]


def _block_mask(
    row_start: NDArray[np.int64], row_end: NDArray[np.int64], num_keys: int, device: torch.device
) -> BlockMask:
    """The visible pairs as FlexAttention wants them, in O(Q + tiles of Q x tiles of K') steps."""
    start, end = (on_device(x.astype(np.int32), device) for x in (row_start, row_end))

    def is_visible(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (start[row] <= key) & (key < end[row])

    touched, full = _tiles(row_start, row_end, num_keys)
    num_partial, partial = _listed(touched & ~full)
    num_full, full_indices = _listed(full)
    block_mask = BlockMask.from_kv_blocks(
        num_partial,
        partial,
        num_full,
        full_indices,
        BLOCK_SIZE=_TILE,
        mask_mod=is_visible,
        seq_lengths=(row_start.size, num_keys),
    )
    return block_mask.to(device)


def _tiles(
    row_start: NDArray[np.int64], row_end: NDArray[np.int64], num_keys: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tiles hold a visible pair, and which hold nothing else.

    Shape:
        row_start, row_end int64[Q] -> bool[ceil(Q / 128), ceil(num_keys / 128)] both.
    """
    shape = (-(-row_start.size // _TILE), -(-num_keys // _TILE) + 1)

    def rows_between(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many rows of a tile of rows have each tile of keys in [first, last)."""
        row = np.flatnonzero(first < last)
        edges = np.zeros(shape, dtype=np.int64)
        np.add.at(edges, (row // _TILE, first[row]), 1)
        np.add.at(edges, (row // _TILE, last[row]), -1)
        return np.cumsum(edges, axis=1)[:, :-1]

    sees = row_start < row_end
    touched = rows_between(row_start // _TILE, np.where(sees, -(-row_end // _TILE), 0))
    inside = rows_between(-(-row_start // _TILE), np.where(sees, row_end // _TILE, 0))
    # The last tile of rows is never full if it has fewer: it is masked, which is always right.
    return touched > 0, inside == _TILE


def _listed(tiles: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number and, ahead of all others, indices of the tiles that are set in each row.

    Shape:
        bool[m, n] -> int32[1, 1, m], int32[1, 1, m, n].
    """
    count = tiles.sum(axis=1).astype(np.int32)
    index = np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(count)[None, None], torch.from_numpy(index)[None, None]
