"""What a staircase costs a kernel that computes whole tiles.

A GPU kernel computes the scores of 128 query rows x 128 keys at a time, and a range that ends
inside a tile costs all of it. So thin rectangles cost more than the pairs that they hold.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.staircase import LeafLimits, Rectangles, Staircase

if TYPE_CHECKING:
    from megatron_splitkv.plan.context_plan import ContextPlan

KERNEL_TILE = 128
_LEAF_LIMITS = LeafLimits(keys=4096, tile=KERNEL_TILE)  # as kernels of such tiles ask for


@dataclass(frozen=True)
class TileWork:
    """Tiles that are computed, and the pairs that were wanted.

    Leaves run as padded matrix products, whose price per pair is a multiple of a fused kernel's:
    `leaf_share` says how much of the work that is.

    Args:
        needed_pairs: visible query-key pairs.
        dense_tiles: tiles of the rectangles.
        leaf_tiles: tiles of the masked leaves.
        tile: rows and keys of a tile.
    """

    needed_pairs: int
    dense_tiles: int
    leaf_tiles: int
    tile: int = KERNEL_TILE

    @property
    def executed_pairs(self) -> int:
        """Pairs in all tiles."""
        return (self.dense_tiles + self.leaf_tiles) * self.tile**2

    @property
    def overhead(self) -> float:
        """Pairs executed for each that is needed; 1 where none is."""
        return self.executed_pairs / self.needed_pairs if self.needed_pairs else 1.0

    @property
    def leaf_share(self) -> float:
        """Part of the tiles that masked leaves compute."""
        return self.leaf_tiles / max(1, self.dense_tiles + self.leaf_tiles)

    def __add__(self, other: "TileWork") -> "TileWork":
        return TileWork(
            self.needed_pairs + other.needed_pairs,
            self.dense_tiles + other.dense_tiles,
            self.leaf_tiles + other.leaf_tiles,
            self.tile,
        )


def tile_work(staircase: Staircase, tile: int = KERNEL_TILE) -> TileWork:
    """Count the tiles of a staircase; every rectangle and leaf begins tiles of its own.

    Args:
        staircase: what one rank computes.
        tile: rows and keys of a tile.
    """
    size = staircase.block_size
    return TileWork(
        needed_pairs=staircase.needed_pairs,
        dense_tiles=sum(_count(level, size, tile) for level in staircase.levels),
        leaf_tiles=_count(staircase.leaves, size, tile),
        tile=tile,
    )


def tiles_of_ranks(plan: "ContextPlan", limits: LeafLimits = _LEAF_LIMITS) -> NDArray[np.int64]:
    """Kernel tiles that every rank computes: its context and its own blocks, over all layers.

    Builds every rank's staircases: for reports, not for planning.

    Args:
        plan: whose ranks; its `windows` are the layers.
        limits: how the kernel has staircases cut.

    Shape:
        -> int64[P].
    """
    tiles = np.zeros(plan.cp_size, dtype=np.int64)
    for window, layers in Counter(plan.windows).items():
        for rank in range(plan.cp_size):
            blocks = np.arange(plan.num_blocks)
            parts = (
                plan.build_staircase(rank, blocks, limits, window),
                plan.build_own_staircase(rank, window),
            )
            works = [tile_work(staircase) for staircase in parts]
            tiles[rank] += layers * sum(work.dense_tiles + work.leaf_tiles for work in works)
    return tiles


def tile_imbalance(plan: "ContextPlan", limits: LeafLimits = _LEAF_LIMITS) -> float:
    """max / mean - 1 of `tiles_of_ranks`; 0 where there is no work at all."""
    tiles = tiles_of_ranks(plan, limits)
    total = int(tiles.sum())
    return int(tiles.max()) * tiles.size / total - 1.0 if total else 0.0


def _count(rectangles: Rectangles, block_size: int, tile: int) -> int:
    rows = (rectangles.q_end - rectangles.q_start) * block_size
    keys = rectangles.k_end - rectangles.k_start
    return int(np.sum(-(-rows // tile) * -(-keys // tile)))
