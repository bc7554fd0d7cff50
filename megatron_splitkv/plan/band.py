"""Exact sliding windows without masks: a rank's visible keys as a band of dense rectangles.

With a window a block's keys lose their far end as its anchor moves on: in local coordinates the
blocks of a document see a band between two staircases. Cut the keys where the first block's band
ends: of the blocks whose band begins before that cut, every one sees the cut's two sides up to its
own ends. Behind the cut lies a staircase of ascending prefixes, before it one of shrinking
suffixes, which is the same thing read backwards. The next block begins the next group. Groups hold
disjoint keys on either side, so all of them share their levels.

The far end differs by slot too: the later a row in its block, the later its first key. Rectangles
take the keys that all rows of a block see; the small triangle that the earlier rows see besides is
a leaf, or part of the leaf in which the far corner ends.

Nothing is ever subtracted: a far key that no row sees is in no rectangle and in no leaf.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.staircase import (
    DEFAULT_LEAF_LIMITS,
    LeafLimits,
    LeafRule,
    Rectangles,
    Staircase,
    split_prefixes,
)

# A leaf wastes at most this share of the pairs that its rows see in the band: a band is short,
# and corners that are nothing beside a long prefix would be half of it. A row is in at most two.
_WASTE_SHARE = 0.04

_MOST_WINDOW = 1 << 62


def check_window(window: int | None) -> None:
    """Refuse windows that hide a query from itself, or that int64 cannot reckon with.

    Raises:
        ConfigError: the window is no int, less than 1 or more than 2**62.
    """
    if window is None:
        return
    is_int = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if not is_int or not 1 <= window <= _MOST_WINDOW:
        raise ConfigError(
            f"window {window} must be at least 1, a query's own position, and an int of at most "
            "2**62; None attends everything"
        )


@dataclass(frozen=True)
class _Band:
    """What the blocks of one pass see; nothing decreases along it.

    Args:
        first: the first key that any row of a block sees.
        start: the first key that all its rows see, at most `end`.
        end: end of its keys, the same for all its rows.
        pairs: query-key pairs that it sees.
        block_size: B.

    Shape:
        int64[n].
    """

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    pairs: NDArray[np.int64]
    block_size: int

    def of(self, blocks: NDArray[np.int64]) -> "_Band":
        """The same of some of the blocks, in that order."""
        return _Band(
            self.first[blocks],
            self.start[blocks],
            self.end[blocks],
            self.pairs[blocks],
            self.block_size,
        )

    def passes(self) -> list[NDArray[np.int64]]:
        """Blocks that see something, in stretches along which nothing decreases.

        Blocks that are neighbours in a pass but not in the layout see no key in common, because no
        rectangle may span the blocks between them.
        """
        blocks = np.flatnonzero(self.first < self.end)
        if blocks.size == 0:
            return []
        seeing = self.of(blocks)
        new_pass = (np.diff(blocks) > 1) & (seeing.start[1:] < seeing.end[:-1])
        for ascending in (seeing.first, seeing.start, seeing.end):
            new_pass |= np.diff(ascending) < 0
        return np.split(blocks, np.flatnonzero(new_pass) + 1)

    def cuts(self) -> NDArray[np.int64]:
        """The key at which each block's band is cut; every band has a key before it.

        A group is a block and those after it whose bands begin before its own ends: there is its
        cut.
        """
        size = self.end.size
        # Groups begin at the orbit of block 0 under `jump`, found by doubling the jump.
        jump = np.append(np.searchsorted(self.start, self.end), size)
        is_first = np.zeros(size + 1, dtype=np.bool_)
        is_first[0] = True
        while not is_first[size]:
            is_first[jump[is_first]] = True
            jump = jump[jump]
        first = np.flatnonzero(is_first[:size])
        return self.end[first].repeat(np.diff(first, append=size))


def build_band_staircase(
    row_start: NDArray[np.int64],
    key_end: NDArray[np.int64],
    block_size: int,
    limits: LeafLimits = DEFAULT_LEAF_LIMITS,
) -> Staircase:
    """Decompose ranges of keys whose start differs from row to row.

    Few levels come of it where starts and ends ascend along the blocks, as they do within a
    document in anchor order: about twice the logarithm of the blocks that share a key.

    Args:
        row_start: first local key that each query row sees, at most its block's `key_end`.
        key_end: end of every block's visible keys.
        block_size: B.
        limits: when a corner stays whole, provided that it wastes little of the band.

    Returns:
        The staircase. Its leaves overlap in query ranges, and in keys.

    Shape:
        row_start int64[N * B], key_end int64[N].
    """
    rows = row_start.reshape(-1, block_size)
    pairs = block_size * key_end - rows.sum(axis=1)
    band = _Band(rows.min(axis=1), rows.max(axis=1), key_end, pairs, block_size)
    levels: list[Rectangles] = []
    leaves: list[Rectangles] = []
    for blocks in band.passes():
        one = band.of(blocks)
        near_levels, near_leaves = _split_near(one, limits)
        far_levels, far_leaves = _split_far(one, limits)
        triangles = _triangles(one, far_leaves)
        levels += [level.of_blocks(blocks) for level in (*far_levels, *near_levels)]
        leaves += [leaf.of_blocks(blocks) for leaf in (*far_leaves, *near_leaves, triangles)]
    merged = Rectangles.joined(leaves)
    cells = sum(level.num_cells for level in levels) + merged.num_cells
    return Staircase(
        levels=levels,
        leaves=merged,
        row_start=row_start,
        row_end=key_end.repeat(block_size),
        block_size=block_size,
        needed_pairs=int(pairs.sum()),
        executed_pairs=block_size * cells,
    )


def _split_near(band: _Band, limits: LeafLimits) -> tuple[list[Rectangles], list[Rectangles]]:
    """Levels and leaves behind the cuts, over positions in the pass."""
    dense = np.flatnonzero(band.start < band.end)
    near = band.of(dense)
    rule = _leaf_rule(near.end, near.end, near.end * band.block_size, near, limits)
    levels, leaves = split_prefixes(near.cuts(), near.end, rule)
    return [x.of_blocks(dense) for x in levels], [x.of_blocks(dense) for x in leaves]


def _split_far(band: _Band, limits: LeafLimits) -> tuple[list[Rectangles], list[Rectangles]]:
    """Levels and leaves before the cuts; a leaf holds the triangles of its blocks."""
    dense = np.flatnonzero(band.start < band.end)
    # Read backwards: last block first, keys negated.
    cut, far = band.of(dense).cuts()[::-1], band.of(dense[::-1])
    negated_starts = far.pairs - far.end * band.block_size  # summed over the rows of a block
    rule = _leaf_rule(-far.start, -far.first, negated_starts, far, limits)
    levels, leaves = split_prefixes(-cut, -far.start, rule)
    leaves = [Rectangles(x.q_start, x.q_end, x.k_start, -far.first[x.q_end - 1]) for x in leaves]

    def forwards(x: Rectangles) -> Rectangles:
        columns = (dense.size - x.q_end, dense.size - x.q_start, -x.k_end, -x.k_start)
        return Rectangles(*(column[::-1] for column in columns)).of_blocks(dense)

    return [forwards(x) for x in levels], [forwards(x) for x in leaves]


def _triangles(band: _Band, far_leaves: list[Rectangles]) -> Rectangles:
    """Keys that the earlier rows of a block see and the last does not, outside the far leaves."""
    pending = band.first < band.start
    for leaf in far_leaves:
        depth = np.zeros(pending.size + 1, dtype=np.int64)
        depth[leaf.q_start] += 1
        depth[leaf.q_end] -= 1
        pending &= np.cumsum(depth[:-1]) == 0
    block = np.flatnonzero(pending)
    return Rectangles(block, block + 1, band.first[block], band.start[block])


def _leaf_rule(
    end: NDArray[np.int64],
    reach: NDArray[np.int64],
    row_ends: NDArray[np.int64],
    band: _Band,
    limits: LeafLimits,
) -> LeafRule:
    """Corners within the limits that waste little of what their rows see.

    Args:
        end: what `split_prefixes` is given.
        reach: how far beyond it a leaf goes that ends with this block.
        row_ends: sum over the rows of a block of how far each of them goes.
        band: the blocks, in that order.
        limits: when a corner may stay whole.
    """
    goes, sees = _prefix_sum(row_ends), _prefix_sum(band.pairs)

    def stays_whole(
        lo: NDArray[np.int64], hi: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        rows, furthest = (hi - lo) * band.block_size, reach[hi - 1]
        wasted = rows * furthest - (goes[hi] - goes[lo])
        little = wasted <= _WASTE_SHARE * (sees[hi] - sees[lo])
        return limits.admit(rows, keys + furthest - end[hi - 1]) & little

    return stays_whole


def _prefix_sum(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(values)])
