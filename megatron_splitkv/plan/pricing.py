"""What a context key costs: the price of any range of packed positions, by prefix sums.

A key at position x is read by every block whose document has begun and whose anchor lies behind:
its cost is c(x) = B * #{i kept : s_i <= x < a_i} query-key pairs. Summed over x < y this is
F(y) = B * sum_i [min(y, a_i) - min(y, s_i)], so a range [l, r) costs F(r) - F(l).
"""

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout


def cumulative_context_work(layout: BlockLayout, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Query-key pairs spent on all context keys before each position.

    Exact in int64 and independent of the context length: two binary searches per position over
    the sorted anchors and document starts, no row is ever materialised.

    Args:
        layout: the blocks; padding blocks cost nothing.
        positions: packed positions, in any order.

    Returns:
        F(position), in query-key pairs (rows of all blocks x keys).

    Shape:
        positions int64[M] -> int64[M].

    Source:
        Equation 6 of the Split-KV paper, written as a difference of prefix sums.
    """
    keep = layout.block_keep_mask
    closing = np.sort(layout.anchor_positions[keep])
    opening = np.sort(layout.document_starts[keep])
    # sum_i min(y, v_i) = (sum of the v_i below y) + y * (number of the others)
    closed = np.searchsorted(closing, positions)
    opened = np.searchsorted(opening, positions)
    pairs = _prefix_sum(closing)[closed] - _prefix_sum(opening)[opened]
    pairs += positions * (opened - closed)
    return layout.block_size * pairs


def price_chunks(layout: BlockLayout, chunk_bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Query-key pairs of every context chunk.

    Args:
        layout: the blocks.
        chunk_bounds: ascending packed positions; chunk j is `[bounds[j], bounds[j + 1])`.

    Shape:
        chunk_bounds int64[C + 1] -> int64[C].
    """
    return np.diff(cumulative_context_work(layout, chunk_bounds))


def price_own_blocks(layout: BlockLayout, cp_size: int) -> NDArray[np.int64]:
    """Query-key pairs of every rank's kept blocks with themselves, B x B each.

    Args:
        layout: the blocks, a multiple of `cp_size` of them; a rank owns N / P consecutive ones.
        cp_size: P.

    Shape:
        -> int64[P].
    """
    kept = layout.block_keep_mask.reshape(cp_size, -1).sum(axis=1, dtype=np.int64)
    return kept * layout.block_size**2


def _prefix_sum(values: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(values.size + 1, dtype=np.int64)
    np.cumsum(values, out=total[1:])
    return total
