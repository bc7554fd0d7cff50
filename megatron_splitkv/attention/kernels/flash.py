"""Partial attention on the FlashAttention that torch ships: one varlen call a level.

The operation has no starts, only cumulative lengths: the rows of a call lie one behind the other.
So a level's rows are gathered, unless they are one range already, and what comes back is merged
into or added to their places. What it promises and what not is kept here:

* A range without queries or without keys is never passed: such rows have a log-sum-exp of +inf.
* It returns outputs and gradients in the dtype of its inputs. Levels share queries and keys, so
  they are merged and added up in fp32 and rounded once.
* It takes a log-sum-exp and an output of the whole softmax in its backward, and reads grouped key
  heads as they are; the backward makes dk and dv of every query head before it adds them.
* Masked corners are too small and too many for it; `leaves` computes them.

Determinism: the forward always is. The backward adds dq atomically and is not, unless
`torch.use_deterministic_algorithms` demands it (`warn_only` does not).

Until a device has run it: tested against the contract of the two operations, not on a GPU.

Source: torch's `_flash_attention_forward` and `_flash_attention_backward`
(aten/src/ATen/native/transformers/cuda), and their checks in `sdp_utils.cpp`.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels.leaves import backward_leaves, forward_leaves
from megatron_splitkv.attention.kernels.packed_rows import merge_rows_, on_device
from megatron_splitkv.attention.kernels.thd import TILE_LEAF_LIMITS, check_row_count, row_ranges
from megatron_splitkv.attention.merge import accumulator_dtype, finite_or_zero, merge_
from megatron_splitkv.plan import Staircase

LEAF_LIMITS = TILE_LEAF_LIMITS

_flash_forward = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default


def forward(
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
    for level in _levels_of(staircase, k.shape[0], q.device):
        level_out, level_lse, *_ = _flash_forward(
            level.q.read(q),
            level.k.read(k),
            level.k.read(v),
            *level.lengths,
            0.0,  # dropout
            False,  # causal
            False,  # debug mask
            scale=softmax_scale,
        )
        level.q.merge_into(out, lse, level_out, level_lse.mT)
    forward_leaves(q, k, v, staircase, softmax_scale, out, lse)
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
    dtype = accumulator_dtype(q.dtype)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    row_lse = finite_or_zero(lse)
    no_random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout is 0: not read
    for level in _levels_of(staircase, k.shape[0], q.device):
        level_grad_q, level_grad_k, level_grad_v = _flash_backward(
            level.q.read(grad_out).to(q.dtype),
            level.q.read(q),
            level.k.read(k),
            level.k.read(v),
            level.q.read(out_carrier).to(q.dtype),
            level.q.read(row_lse).mT.contiguous(),
            *level.lengths,
            0.0,  # dropout
            False,  # causal
            no_random_state,
            no_random_state,
            scale=softmax_scale,
        )
        level.q.add_into(grad_q, level_grad_q)
        level.k.add_into(grad_k, level_grad_k)
        level.k.add_into(grad_v, level_grad_v)
    backward_leaves(
        grad_out, q, k, v, out_carrier, lse, staircase, softmax_scale, grad_q, grad_k, grad_v
    )
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


@dataclass(frozen=True)
class _Rows:
    """The rows of one side of a level: in place if they are one range, else by index."""

    where: slice | torch.Tensor

    @classmethod
    def of(
        cls, start: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device
    ) -> "_Rows":
        """The ranges `[start, start + lengths)`, ascending and disjoint."""
        ends = start + lengths
        if (ends[:-1] == start[1:]).all():
            return cls(slice(int(start[0]), int(ends[-1])))
        first = np.cumsum(lengths) - lengths
        rows = np.repeat(start - first, lengths) + np.arange(lengths.sum())
        return cls(on_device(rows, device))

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, h, ...]`` -> ``[n, h, ...]``, adjacent along the last dimension."""
        if isinstance(self.where, torch.Tensor):
            return x.index_select(0, self.where)
        rows = x[self.where]
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def merge_into(
        self, out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
    ) -> None:
        """Merge ``[n, h, d]`` and ``[n, h]`` into these rows of `out` and `lse`."""
        if isinstance(self.where, torch.Tensor):
            merge_rows_(out, lse, self.where, other_out, other_lse)
        else:
            merge_(out[self.where], lse[self.where], other_out, other_lse)

    def add_into(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``[n, h, d]`` to these rows of `total`."""
        if isinstance(self.where, torch.Tensor):
            total.index_add_(0, self.where, x.to(total.dtype))  # no row twice: deterministic
        else:
            total[self.where] += x


@dataclass(frozen=True)
class _Level:
    """One call.

    Args:
        q: its query rows.
        k: its key rows.
        lengths: cumulative lengths of the query and of the key ranges, int32; the longest of each.
    """

    q: _Rows
    k: _Rows
    lengths: tuple[torch.Tensor, torch.Tensor, int, int]


# Every layer and both directions make the same calls; they are laid out and copied once.
_LEVELS: WeakKeyDictionary[Staircase, dict[torch.device, list[_Level]]] = WeakKeyDictionary()


def _levels_of(staircase: Staircase, num_keys: int, device: torch.device) -> list[_Level]:
    made = _LEVELS.setdefault(staircase, {})
    if device not in made:
        check_row_count(staircase.num_rows, num_keys)
        ranges = [row_ranges(level, staircase.block_size) for level in staircase.levels]
        made[device] = [_lay_out(*level, device) for level in ranges if level[0].size]
    return made[device]


def _lay_out(start: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> _Level:
    """The call over these ranges; queries in row 0 and keys in row 1 of ``[2, M]``."""
    cumulative = np.zeros((2, lengths.shape[1] + 1), dtype=np.int32)
    np.cumsum(lengths, axis=1, out=cumulative[:, 1:])
    cu_q, cu_k = on_device(cumulative, device)
    # At a longest range of one query the operation takes a path for decoding, which returns the
    # statistics in another order.
    longest_q, longest_k = max(2, int(lengths[0].max())), int(lengths[1].max())
    return _Level(
        q=_Rows.of(start[0], lengths[0], device),
        k=_Rows.of(start[1], lengths[1], device),
        lengths=(cu_q.contiguous(), cu_k.contiguous(), longest_q, longest_k),
    )
