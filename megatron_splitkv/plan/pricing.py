"""What a context key costs: the price of any range of packed positions, by prefix sums.

A key at position x is read by every block whose document has begun and whose anchor lies behind:
its cost is c(x) = B * #{i kept : s_i <= x < a_i} query-key pairs. Summed over x < y this is
F(y) = B * sum_i [min(y, a_i) - min(y, s_i)], so a range [l, r) costs F(r) - F(l).

A sliding window of W hides the far keys, and from a later slot more of them: slot t begins to see
at o_it = min(a_i, max(s_i, a_i + t - W + 1)), and N * B such points take the place of the s_i.
Layers with different windows are priced by the sum: a rank goes through all of them before it
waits for the others in earnest, and one plan serves the whole step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.tiles import KERNEL_TILE

FULL_ATTENTION: tuple[int | None, ...] = (None,)


def cumulative_context_work(
    layout: BlockLayout,
    positions: NDArray[np.int64],
    windows: Sequence[int | None] = FULL_ATTENTION,
) -> NDArray[np.int64]:
    """Query-key pairs spent on all context keys before each position.

    Exact in int64 and independent of the context length: two binary searches per position and
    window over the sorted points at which rows begin and cease to see, no row of the context is
    ever materialised.

    Args:
        layout: the blocks; padding blocks cost nothing.
        positions: packed positions, in any order.
        windows: of the layers, one entry each; None is full attention.

    Returns:
        F(position) summed over the layers, in query-key pairs (rows of all blocks x keys).

    Shape:
        positions int64[M] -> int64[M].

    Source:
        Equation 6 of the Split-KV paper, written as a difference of prefix sums.
    """
    anchors, starts = _kept(layout)
    closed = layout.block_size * _sum_of_minima(anchors, positions)
    pairs = len(windows) * closed
    for window, layers in layers_by_window(windows).items():
        if window is None:
            opened = layout.block_size * _sum_of_minima(starts, positions)
        else:
            first_seen = window_starts(anchors, starts, layout.block_size, window)
            opened = _sum_of_minima(first_seen.ravel(), positions)
        pairs -= layers * opened
    return pairs


def price_chunks(
    layout: BlockLayout,
    chunk_bounds: NDArray[np.int64],
    windows: Sequence[int | None] = FULL_ATTENTION,
) -> NDArray[np.int64]:
    """Query-key pairs of every context chunk.

    Args:
        layout: the blocks.
        chunk_bounds: ascending packed positions; chunk j is `[bounds[j], bounds[j + 1])`.
        windows: of the layers, one entry each.

    Shape:
        chunk_bounds int64[C + 1] -> int64[C].
    """
    return np.diff(cumulative_context_work(layout, chunk_bounds, windows))


def price_own_blocks(
    layout: BlockLayout, cp_size: int, windows: Sequence[int | None] = FULL_ATTENTION
) -> NDArray[np.int64]:
    """Query-key pairs of every rank's kept blocks with themselves.

    Under full attention a block sees all its B x B pairs. With a window it is causal, and a slot
    sees itself and at most the `window - 1` slots before it.

    Args:
        layout: the blocks, a multiple of `cp_size` of them; a rank owns N / P consecutive ones.
        cp_size: P.
        windows: of the layers, one entry each.

    Shape:
        -> int64[P].
    """
    size = layout.block_size
    pairs = 0
    for window, layers in layers_by_window(windows).items():
        if window is None:
            pairs += layers * size**2
        else:
            near = min(window, size)  # slots 0 to near - 1 see all before them, the others `near`
            pairs += layers * (near * (near + 1) // 2 + (size - near) * near)
    return kept_blocks(layout, cp_size) * pairs


def price_chunks_in_tiles(
    layout: BlockLayout,
    chunk_bounds: NDArray[np.int64],
    windows: Sequence[int | None] = FULL_ATTENTION,
) -> NDArray[np.int64]:
    """Pairs of the kernel tiles of 128 rows x 128 keys that every chunk touches.

    A model of a kernel that walks a chunk in tiles of keys, the last one padded, and computes for
    each as many tiles of rows as hold the rows that see any of its keys. What a rank's staircase
    really costs also depends on where its levels are cut, and on chunks that become neighbours on
    a rank: `tiles.tile_work` counts that, for a plan that exists.

    Args:
        layout: the blocks.
        chunk_bounds: ascending packed positions; chunk j is `[bounds[j], bounds[j + 1])`.
        windows: of the layers, one entry each.

    Returns:
        Pairs, those that nobody wanted included; needs S / 128 entries of memory.

    Shape:
        chunk_bounds int64[C + 1] -> int64[C].
    """
    tiles = -(-np.diff(chunk_bounds) // KERNEL_TILE)
    chunk = np.repeat(np.arange(tiles.size), tiles)
    number = np.arange(chunk.size) - (np.cumsum(tiles) - tiles)[chunk]
    start = chunk_bounds[chunk] + number * KERNEL_TILE
    end = np.minimum(start + KERNEL_TILE, chunk_bounds[chunk + 1])

    anchors, starts = _kept(layout)
    row_tiles = np.zeros(chunk.size, dtype=np.int64)
    for window, layers in layers_by_window(windows).items():
        if window is None:
            first, rows = starts[:, None], layout.block_size
        else:
            first, rows = window_starts(anchors, starts, layout.block_size, window), 1
        sees = first < anchors[:, None]
        begun = np.sort(first[sees])
        ended = np.sort(np.broadcast_to(anchors[:, None], first.shape)[sees])
        seeing = rows * (begun.searchsorted(end) - ended.searchsorted(start, side="right"))
        row_tiles += layers * -(-seeing // KERNEL_TILE)
    prices = np.zeros(tiles.size, dtype=np.int64)
    np.add.at(prices, chunk, row_tiles)
    return KERNEL_TILE**2 * prices


def price_own_blocks_in_tiles(
    layout: BlockLayout, cp_size: int, windows: Sequence[int | None] = FULL_ATTENTION
) -> NDArray[np.int64]:
    """Pairs of the kernel tiles of every rank's kept blocks with themselves: each has its own.

    Args:
        layout: the blocks, a multiple of `cp_size` of them.
        cp_size: P.
        windows: of the layers, one entry each.

    Shape:
        -> int64[P].
    """
    side = -(-layout.block_size // KERNEL_TILE) * KERNEL_TILE
    return kept_blocks(layout, cp_size) * (len(windows) * side**2)


def kept_blocks(layout: BlockLayout, cp_size: int) -> NDArray[np.int64]:
    """How many of its blocks are no padding, for every rank.

    Shape:
        -> int64[P].
    """
    return layout.block_keep_mask.reshape(cp_size, -1).sum(axis=1, dtype=np.int64)


def window_starts(
    anchors: NDArray[np.int64], starts: NDArray[np.int64], block_size: int, window: int
) -> NDArray[np.int64]:
    """First context position that every slot of a block sees; its anchor where it sees none.

    A query at position p sees the keys x of its document with p - x < window; slot 0 is at its
    anchor, and the context ends there for all slots.

    Shape:
        anchors, starts int64[N] -> int64[N, B].
    """
    anchors, starts = anchors[:, None], starts[:, None]
    first = anchors + np.arange(1 - window, block_size + 1 - window)
    return np.clip(first, starts, np.maximum(anchors, starts))


def layers_by_window(windows: Sequence[int | None]) -> dict[int | None, int]:
    """How many layers have each window."""
    return {window: windows.count(window) for window in windows}


def _kept(layout: BlockLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(anchors, document starts) of the blocks that are no padding."""
    keep = layout.block_keep_mask
    if keep.all():
        return layout.anchor_positions, layout.document_starts
    return layout.anchor_positions[keep], layout.document_starts[keep]


def _sum_of_minima(values: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """sum_i min(y, v_i) for every position y: those below it, and y for each of the others."""
    in_order = (values[1:] >= values[:-1]).all()  # as packs have them
    ascending = values if in_order else np.sort(values)
    below = ascending.searchsorted(positions)
    sums = np.zeros(values.size + 1, dtype=np.int64)
    np.cumsum(ascending, out=sums[1:])
    return sums[below] + positions * (values.size - below)
