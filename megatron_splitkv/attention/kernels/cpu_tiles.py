"""How the CPU kernel walks a staircase: large rectangles as views, small ones in batches.

One call of torch's CPU attention has a price, and merging its result has a larger one; for packs of
short documents they exceed the arithmetic. So rectangles of similar shape within a level (or among
the leaves) are gathered into one batch, padded to the largest of them and masked.

Shape legend: T tiles of a batch, m query rows and n keys of the largest, h heads, d head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels.packed_rows import (
    PackedRows,
    similar_shapes,
    visible_keys,
)
from megatron_splitkv.attention.merge import merge_
from megatron_splitkv.plan import Rectangles, Staircase

# Query-key pairs from which a rectangle is worth a call of its own (measured, and as flat).
VIEW_PAIRS = 32 * 1024
# Bound on T * m * n: the mask of a batch is that many numbers, and the keys that it gathers are
# few, however many each of its queries sees.
_BATCH_PAIRS = 256 * 1024


class Tile(Protocol):
    """One call's share of the staircase: disjoint query rows, each with its keys."""

    @property
    def visible(self) -> torch.Tensor | None:
        """Keys that each row sees, from its tile's first, int64 ``[T, m, 2]``; None: all."""
        ...

    @property
    def num_keys(self) -> int:
        """n."""
        ...

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[Q, h, d]`` -> ``[T, h, m, d]``."""
        ...

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[K, h, d]`` -> ``[T, h, n, d]``."""
        ...

    def merge_out(
        self, out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
    ) -> None:
        """Merge ``[T, h, m, d]`` and ``[T, h, m]`` into ``[Q, h, d]`` and ``[Q, h]``."""
        ...

    def add_to_queries(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``[T, h, m, d]`` to ``[Q, h, d]``."""
        ...

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``[T, h, n, d]`` to ``[K, h, d]``."""
        ...


@dataclass(frozen=True)
class ViewTile:
    """One large rectangle, read and written in place."""

    q: slice
    k: slice
    visible: torch.Tensor | None

    @property
    def num_keys(self) -> int:
        return int(self.k.stop - self.k.start)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.q].transpose(0, 1)[None]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.k].transpose(0, 1)[None]

    def merge_out(
        self, out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
    ) -> None:
        merge_(out[self.q], lse[self.q], tile_out[0].transpose(0, 1), tile_lse[0].transpose(0, 1))

    def add_to_queries(self, total: torch.Tensor, x: torch.Tensor) -> None:
        total[self.q] += x[0].transpose(0, 1)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        total[self.k] += x[0].transpose(0, 1)


@dataclass(frozen=True)
class BatchTile:
    """Small rectangles of similar shape, gathered, computed together and scattered."""

    q: PackedRows
    k: PackedRows
    visible: torch.Tensor | None

    @property
    def num_keys(self) -> int:
        return self.k.index.numel() // self.k.num_tiles

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.q.gather(x)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return self.k.gather(x)

    def merge_out(
        self, out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor
    ) -> None:
        self.q.merge_into(out, lse, tile_out, tile_lse)

    def add_to_queries(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self.q.add_into(total, x)

    def add_to_keys(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self.k.add_into(total, x)


# Every layer and both directions walk the same staircase; it is laid out once.
_TILES: WeakKeyDictionary[Staircase, list[Tile]] = WeakKeyDictionary()


def tiles_of(staircase: Staircase) -> list[Tile]:
    """All tiles of a staircase; each visible (row, key) pair is in exactly one."""
    if staircase not in _TILES:
        tiles: list[Tile] = []
        for level in staircase.levels:
            tiles += _lay_out(level, staircase, masked=False)
        for leaves in staircase.leaves.disjoint():
            tiles += _lay_out(leaves, staircase, masked=True)
        _TILES[staircase] = tiles
    return _TILES[staircase]


def _lay_out(rectangles: Rectangles, staircase: Staircase, *, masked: bool) -> Iterator[Tile]:
    """Tiles of one level, or of leaves if `masked`."""
    size = staircase.block_size
    blocks = rectangles.q_end - rectangles.q_start
    keys = rectangles.k_end - rectangles.k_start
    large = blocks * keys * size >= VIEW_PAIRS
    for i in np.flatnonzero(large):
        yield ViewTile(
            slice(rectangles.q_start[i] * size, rectangles.q_end[i] * size),
            slice(rectangles.k_start[i], rectangles.k_end[i]),
            _visible(rectangles, np.array([i]), staircase, masked=masked),
        )
    for group in similar_shapes(blocks, keys, np.flatnonzero(~large & (blocks * keys > 0))):
        area = int(blocks[group].max() * keys[group].max()) * size
        num_parts = min(group.size, -(-group.size * area // _BATCH_PAIRS))
        for part in np.array_split(group, num_parts):
            yield BatchTile(
                PackedRows.of(rectangles.q_start[part] * size, blocks[part] * size),
                PackedRows.of(rectangles.k_start[part], keys[part]),
                _visible(rectangles, part, staircase, masked=masked),
            )


def _visible(
    rectangles: Rectangles, chosen: NDArray[np.int64], staircase: Staircase, *, masked: bool
) -> torch.Tensor | None:
    """`visible_keys` as a tensor; None if all rows see all keys."""
    visible = visible_keys(rectangles, chosen, staircase, masked=masked)
    if (visible == (0, (rectangles.k_end - rectangles.k_start)[chosen].max())).all():
        return None
    return torch.from_numpy(visible)
