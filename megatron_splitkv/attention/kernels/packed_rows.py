"""Small rectangles of similar shape as one padded batch, on any device.

A batch of tiny attentions costs a few operations, where one by one each would cost that many. Rows
are gathered by index, padded to the longest range, and scattered back without the padding.

Shape legend: T rectangles of a batch, m query rows and n keys of the largest, h heads, d head
width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.merge import merge_
from megatron_splitkv.plan import Rectangles, Staircase


@dataclass(frozen=True)
class PackedRows:
    """Ranges of rows as the rows of one padded batch.

    Padding repeats the first row of its range: a row that takes part anyway, so it holds no NaN
    that the real result would not have.

    Args:
        index: rows to read.
        real: positions within `index` that are not padding; None if none is padding.
        num_tiles: T.

    Shape:
        index int64[T * length]; real int64[sum of range lengths].
    """

    index: torch.Tensor
    real: torch.Tensor | None
    num_tiles: int

    @classmethod
    def of(
        cls,
        start: NDArray[np.int64],
        lengths: NDArray[np.int64],
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
    ) -> "PackedRows":
        """Pack the ranges `[start, start + lengths)`, none of them empty."""
        offset = np.arange(lengths.max())
        is_real = offset < lengths[:, None]
        index = start[:, None] + np.where(is_real, offset, 0)
        return cls(
            index=on_device(index.ravel(), device),
            real=None if is_real.all() else on_device(np.flatnonzero(is_real), device),
            num_tiles=start.size,
        )

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, h, d]`` -> ``[T, h, length, d]``."""
        return x.index_select(0, self.index).unflatten(0, (self.num_tiles, -1)).transpose(1, 2)

    def real_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, h, length, ...]`` -> indices of the rows that are not padding, and those rows."""
        rows = x.transpose(1, 2).flatten(0, 1)
        if self.real is None:
            return self.index, rows
        return self.index.index_select(0, self.real), rows.index_select(0, self.real)

    def merge_into(
        self, out: torch.Tensor, lse: torch.Tensor, batch_out: torch.Tensor, batch_lse: torch.Tensor
    ) -> None:
        """Merge ``[T, h, length, d]`` and ``[T, h, length]`` into rows of `out` and `lse`.

        No row may be in two of the ranges.

        Shape:
            out ``[rows, h, d]``, lse ``[rows, h]``.
        """
        index, other_out = self.real_rows(batch_out)
        _, other_lse = self.real_rows(batch_lse)
        merge_rows_(out, lse, index, other_out, other_lse)

    def add_into(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``[T, h, length, d]`` to rows of ``[rows, h, d]``; a row may be in many ranges."""
        index, rows = self.real_rows(x)
        total.index_add_(0, index, rows.to(total.dtype))


def merge_rows_(
    out: torch.Tensor,
    lse: torch.Tensor,
    index: torch.Tensor,
    other_out: torch.Tensor,
    other_lse: torch.Tensor,
) -> None:
    """`merge_` into the rows at `index`, of which no two are the same.

    Shape:
        out ``[rows, h, d]``, lse ``[rows, h]``, other_out ``[n, h, d]``, other_lse ``[n, h]``,
        index int64[n].
    """
    rows_out, rows_lse = out.index_select(0, index), lse.index_select(0, index)
    merge_(rows_out, rows_lse, other_out, other_lse)
    out.index_copy_(0, index, rows_out)
    lse.index_copy_(0, index, rows_lse)


def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`, copied without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def similar_shapes(
    rows: NDArray[np.int64],
    keys: NDArray[np.int64],
    chosen: NDArray[np.int64],
    *,
    per_octave: int = 4,
) -> Iterator[NDArray[np.int64]]:
    """Split the chosen rectangles into groups of nearly equal sides.

    Args:
        rows: one side of every rectangle, in any unit.
        keys: the other.
        chosen: indices of the rectangles to group, none of them empty.
        per_octave: sides within a group differ by a factor of less than 2^(1 / per_octave).

    Shape:
        rows, keys int64[M].
    """
    if chosen.size == 0:
        return
    sides = np.stack([rows[chosen], keys[chosen]])
    shape = np.floor(per_octave * np.log2(sides)).astype(np.int64)
    _, group = np.unique(shape, axis=1, return_inverse=True)
    for g in range(group.max() + 1):
        yield chosen[group.ravel() == g]


def visible_keys(
    rectangles: Rectangles, chosen: NDArray[np.int64], staircase: Staircase, *, masked: bool
) -> NDArray[np.int64]:
    """The visible keys of each row of the padded batch of the chosen rectangles.

    Args:
        rectangles: a level, or leaves.
        chosen: which of them make the batch.
        staircase: whose.
        masked: whether a row sees only its own part of the keys, as in leaves.

    Returns:
        Ranges counted from the first key of each rectangle; empty for padding.

    Shape:
        int64[T, m, 2].
    """
    rows = (rectangles.q_end - rectangles.q_start)[chosen, None] * staircase.block_size
    keys = (rectangles.k_end - rectangles.k_start)[chosen, None]
    offset = np.arange(rows.max())
    is_real = offset < rows
    start, end = np.zeros_like(keys), keys
    if masked:
        row = rectangles.q_start[chosen, None] * staircase.block_size + np.where(is_real, offset, 0)
        first = rectangles.k_start[chosen, None]
        start = np.clip(staircase.row_start[row] - first, 0, keys)
        end = np.clip(staircase.row_end[row] - first, 0, keys)
    return np.stack(np.broadcast_arrays(start, np.where(is_real, end, 0)), axis=-1)
