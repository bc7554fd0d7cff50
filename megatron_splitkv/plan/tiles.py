"""What a staircase costs a kernel that computes whole tiles.

A GPU kernel computes the scores of 128 query rows x 128 keys at a time, and a range that ends
inside a tile costs all of it. So thin rectangles cost more than the pairs that they hold.
"""

from dataclasses import dataclass

import numpy as np

from megatron_splitkv.plan.staircase import Rectangles, Staircase

KERNEL_TILE = 128


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


def _count(rectangles: Rectangles, block_size: int, tile: int) -> int:
    rows = (rectangles.q_end - rectangles.q_start) * block_size
    keys = rectangles.k_end - rectangles.k_start
    return int(np.sum(-(-rows // tile) * -(-keys // tile)))
