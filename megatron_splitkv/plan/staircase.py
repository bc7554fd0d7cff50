"""Exact attention without masks: a rank's visible keys as a few levels of dense rectangles.

On one rank the blocks of a document, sorted by anchor, see growing prefixes of the document's
local keys: a staircase. It falls apart into one leading rectangle (all blocks x the prefix that
they share) and a dyadic rest: the upper half of the blocks x the keys up to the middle block's
end is dense, and both remaining corners are smaller staircases. All corners of one depth form a
level; its query ranges are disjoint and so are its key ranges, so a level is one varlen call.
Corners of about one kernel tile stay whole and are computed under a mask (leaves). For kernels
that compute whole tiles the cuts lie at multiples of a tile; what a rectangle then lacks is left to
its corners, and in the end to a leaf that is computed anyway.

Everything is vectorised over the documents and corners of a level; nothing here touches a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LeafLimits:
    """When a corner of the staircase stays whole.

    A corner becomes a leaf if it has at most `rows` query rows and `keys` keys, or at most `pairs`
    query-key pairs. With `rows` and `pairs` 0 there are no leaves and not one pair is computed in
    vain; thin rectangles then waste kernel tiles instead.

    Args:
        rows: query rows of one kernel tile.
        keys: bounds the masked scores of a leaf where anchors are few and far apart.
        pairs: one kernel tile of 128 x 128.
        tile: side of the kernel's tiles; rows and keys are cut at multiples of it, 1 anywhere.
    """

    rows: int = 128
    keys: int = 2048
    pairs: int = 128 * 128
    tile: int = 1

    def admit(self, rows: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether corners of so many query rows and keys may stay whole."""
        return ((rows <= self.rows) & (keys <= self.keys)) | (rows * keys <= self.pairs)


DEFAULT_LEAF_LIMITS = LeafLimits()

LeafRule = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""Of corners, by their first block, the end of their blocks and their keys: which stay whole."""


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Ranges of blocks x ranges of local keys, half open.

    Shape:
        q_start, q_end (block indices in layout order), k_start, k_end (local rows): int64[M].
    """

    q_start: NDArray[np.int64]
    q_end: NDArray[np.int64]
    k_start: NDArray[np.int64]
    k_end: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.q_start.size)

    @property
    def num_cells(self) -> int:
        """Sum of the areas, in blocks x keys."""
        return int(((self.q_end - self.q_start) * (self.k_end - self.k_start)).sum())

    def disjoint(self) -> list["Rectangles"]:
        """The rectangles in as few sets as possible whose query ranges are disjoint, in order."""
        # Sorted by their start, rectangle i overlaps those before it that end after its start.
        ends = np.sort(self.q_end)
        depth = np.arange(len(self)) - np.searchsorted(ends, self.q_start, side="right")
        sets, last_end = np.zeros(len(self), dtype=np.int64), [0]
        if depth.any():
            for i, (start, end) in enumerate(zip(self.q_start, self.q_end, strict=True)):
                free = next((s for s, e in enumerate(last_end) if e <= start), len(last_end))
                last_end[free : free + 1] = [end]
                sets[i] = free
        return [self._select(np.flatnonzero(sets == s)) for s in range(len(last_end))]

    def of_blocks(self, blocks: NDArray[np.int64]) -> "Rectangles":
        """Query ranges that count positions in `blocks`, as ranges of these blocks."""
        return Rectangles(
            blocks[self.q_start], blocks[self.q_end - 1] + 1, self.k_start, self.k_end
        )

    @classmethod
    def joined(cls, parts: Sequence["Rectangles"]) -> "Rectangles":
        """All rectangles in ascending order of their query ranges."""
        if not parts:
            empty = np.empty(0, dtype=np.int64)
            return cls(empty, empty, empty, empty)
        every = cls(
            np.concatenate([part.q_start for part in parts]),
            np.concatenate([part.q_end for part in parts]),
            np.concatenate([part.k_start for part in parts]),
            np.concatenate([part.k_end for part in parts]),
        )
        return every._select(np.argsort(every.q_start, kind="stable"))

    def _select(self, chosen: NDArray[np.int64]) -> "Rectangles":
        return Rectangles(
            self.q_start[chosen], self.q_end[chosen], self.k_start[chosen], self.k_end[chosen]
        )


@dataclass(frozen=True, eq=False)
class Staircase:
    """Which of one rank's keys every query row sees, as dense levels and masked leaves.

    A query row sees one contiguous range of local keys. Each visible (row, key) pair is in exactly
    one rectangle or leaf.

    Args:
        levels: dense rectangles; within a level query ranges are disjoint and ascending and so are
            key ranges. No rectangle is empty.
        leaves: masked remainders: a row of a leaf sees the leaf's keys that are also its own
            (`row_start <= key < row_end`), perhaps none. In ascending order of their query ranges.
            Those of `build_staircase` have disjoint query ranges, and if the blocks are in the
            order of `select_anchors` disjoint keys; those of a band overlap in both.
        row_start: first visible local key of every query row.
        row_end: end of the visible local keys; equal to `row_start` where nothing is visible.
        block_size: B, query rows a block.
        needed_pairs: visible query-key pairs.
        executed_pairs: the pairs that the rectangles and whole leaves hold.

    Shape:
        row_start, row_end int64[N * B].
    """

    levels: list[Rectangles]
    leaves: Rectangles
    row_start: NDArray[np.int64]
    row_end: NDArray[np.int64]
    block_size: int
    needed_pairs: int
    executed_pairs: int

    @property
    def num_rows(self) -> int:
        """Q, query rows."""
        return int(self.row_start.size)


def build_staircase(
    key_start: NDArray[np.int64],
    key_end: NDArray[np.int64],
    block_size: int,
    limits: LeafLimits = DEFAULT_LEAF_LIMITS,
) -> Staircase:
    """Decompose the visible prefixes of all blocks.

    Args:
        key_start: first local key of every block's document.
        key_end: end of every block's visible prefix (equal to `key_start`: sees nothing).
        block_size: B.
        limits: when a corner stays whole.

    Shape:
        key_start, key_end int64[N].
    """

    def stays_whole(
        lo: NDArray[np.int64], hi: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return limits.admit((hi - lo) * block_size, keys)

    levels: list[Rectangles] = []
    leaves: list[Rectangles] = []
    tile = max(1, limits.tile // block_size), limits.tile
    for blocks in _ascending_passes(key_start, key_end):
        whole, is_rest = _short_documents(
            key_start[blocks], key_end[blocks], limits.pairs // block_size
        )
        leaves.append(whole.of_blocks(blocks))
        blocks = blocks[is_rest]
        if blocks.size == 0:
            continue
        pass_levels, pass_leaves = split_prefixes(
            key_start[blocks], key_end[blocks], stays_whole, tile
        )
        levels += [level.of_blocks(blocks) for level in pass_levels]
        leaves += [leaf.of_blocks(blocks) for leaf in pass_leaves]
    merged = Rectangles.joined(leaves)
    cells = sum(level.num_cells for level in levels) + merged.num_cells
    return Staircase(
        levels=levels,
        leaves=merged,
        row_start=key_start.repeat(block_size),
        row_end=key_end.repeat(block_size),
        block_size=block_size,
        needed_pairs=block_size * int((key_end - key_start).sum()),
        executed_pairs=block_size * cells,
    )


def _ascending_passes(
    key_start: NDArray[np.int64], key_end: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Blocks that see something, cut into stretches that hold each document's run once.

    One pass for layouts in the order of `select_anchors`. Other orders (padding amid a document,
    unsorted anchors) need a new pass where a document is met again: two runs of a document share
    keys, and key ranges must be disjoint within a level.
    """
    blocks = np.flatnonzero(key_end > key_start)
    if blocks.size == 0:
        return []
    # Among blocks that see something, equal key_start means the same document.
    start, end = key_start[blocks], key_end[blocks]
    same_document = start[1:] == start[:-1]
    run_goes_on = same_document & (np.diff(blocks) == 1) & (end[1:] >= end[:-1])
    new_pass = ~run_goes_on & (start[1:] <= start[:-1])
    return np.split(blocks, np.flatnonzero(new_pass) + 1)


def _short_documents(
    start: NDArray[np.int64], end: NDArray[np.int64], cells: int
) -> tuple[Rectangles, NDArray[np.bool_]]:
    """Documents of one pass that are a leaf from the start: a rectangle less for each.

    Args:
        start: first key of every block's document.
        end: end of its keys.
        cells: blocks x keys that such a document has at most.

    Returns:
        The documents, and which blocks are of others. Query ranges count positions in `start`.

    Shape:
        start, end, the mask [n].
    """
    lo = np.flatnonzero(np.diff(start, prepend=start[:1] - 1))
    hi = np.append(lo, end.size)[1:]
    k0, k1 = start[lo], end[hi - 1]
    short = ((hi - lo) * (k1 - k0) <= cells) & (end[lo] < k1)  # the rest needs no mask
    return Rectangles(lo, hi, k0, k1)._select(np.flatnonzero(short)), ~np.repeat(short, hi - lo)


def split_prefixes(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    stays_whole: LeafRule,
    tile: tuple[int, int] = (1, 1),
) -> tuple[list[Rectangles], list[Rectangles]]:
    """Cut staircases that stand side by side: a row of blocks, each with a range of keys.

    Args:
        start: first key of every block; neighbours of the same staircase have the same, which lies
            behind all keys of the staircases before it.
        end: end of its keys, at least its start; never decreases.
        stays_whole: which corners become leaves; their blocks, too, count positions in `start`.
        tile: blocks and keys at whose multiples to cut.

    Returns:
        Levels and leaves, in parts. Query ranges count positions in `start`.

    Shape:
        start, end int64[n].
    """
    levels: list[Rectangles] = []
    leaves: list[Rectangles] = []
    tile_blocks, _ = tile
    # Blocks [lo, hi) lack their keys from k0 on. The next segment's rectangles begin at key `last`,
    # so theirs must end there; what a block sees beyond it, less than a tile, is left to a leaf.
    lo = np.flatnonzero(np.diff(start, prepend=start[:1] - 1))
    hi = np.append(lo, end.size)[1:]
    last = end[hi - 1]
    k0 = _add_level(levels, end, lo, lo, hi, start[lo], last, tile)
    while True:
        lo = np.maximum(lo, np.searchsorted(end, k0, side="right"))  # those below are complete
        open_ = lo < hi
        lo, hi, k0, last = lo[open_], hi[open_], k0[open_], last[open_]
        if lo.size == 0:
            return levels, leaves
        is_leaf = stays_whole(lo, hi, end[hi - 1] - k0) | ((hi - lo == 1) & (k0 == last))
        if is_leaf.any():
            leaf_lo, leaf_hi = lo[is_leaf], hi[is_leaf]
            leaves.append(Rectangles(leaf_lo, leaf_hi, k0[is_leaf], end[leaf_hi - 1]))
            lo, hi, k0, last = lo[~is_leaf], hi[~is_leaf], k0[~is_leaf], last[~is_leaf]
            if lo.size == 0:
                return levels, leaves
        upper = (hi - lo + 1) // 2
        whole_tiles = np.maximum(upper // tile_blocks, 1) * tile_blocks
        middle = hi - np.where(hi - lo > tile_blocks, whole_tiles, upper)
        k1 = _add_level(levels, end, lo, middle, hi, k0, last, tile)
        lo = np.stack([lo, middle], axis=1).ravel()
        hi = np.stack([middle, hi], axis=1).ravel()
        k0 = np.stack([k0, k1], axis=1).ravel()
        last = np.stack([np.minimum(last, k1), last], axis=1).ravel()


def _add_level(
    levels: list[Rectangles],
    end: NDArray[np.int64],
    lo: NDArray[np.int64],
    middle: NDArray[np.int64],
    hi: NDArray[np.int64],
    k0: NDArray[np.int64],
    last: NDArray[np.int64],
    tile: tuple[int, int],
) -> NDArray[np.int64]:
    """Append the blocks [middle, hi) x the keys from k0 on that all of them see.

    Returns:
        Where the rectangles end: whole tiles behind k0, but with the last key where that completes
        all these blocks, or a tile of blocks on the other side of `middle`: masked leaves for what
        is left of so many blocks would cost more than a part of a tile.
    """
    tile_blocks, tile_keys = tile
    below = np.maximum(middle - tile_blocks, lo)
    completes = end[middle] == end[hi - 1]
    completes |= (middle - lo >= tile_blocks) & (end[middle] == end[below])
    k1 = np.minimum(end[middle], last)
    k1 = np.where(completes, k1, k0 + (k1 - k0) // tile_keys * tile_keys)
    wide = np.flatnonzero(k0 < k1)
    if wide.size:
        levels.append(Rectangles(middle, hi, k0, k1)._select(wide))
    return k1
