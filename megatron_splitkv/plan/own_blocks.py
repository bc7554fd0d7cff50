"""The second, small part of every query's keys: the rows of its own draft block."""

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.staircase import Rectangles, Staircase


def own_block_staircase(keep: NDArray[np.bool_], block_size: int) -> Staircase:
    """Visibility of blocks to themselves: each kept block sees its own B rows, all of them.

    A staircase of one level, so that a kernel treats these keys like any others.

    Args:
        keep: False for padding blocks, which see nothing.
        block_size: B.

    Returns:
        The staircase over these blocks' query rows and equally many key rows.

    Shape:
        keep bool[n].
    """
    kept = np.flatnonzero(keep)
    nothing = np.empty(0, dtype=np.int64)
    start = np.where(keep, np.arange(keep.size) * block_size, 0)
    pairs = kept.size * block_size**2
    return Staircase(
        levels=[Rectangles(kept, kept + 1, kept * block_size, (kept + 1) * block_size)],
        leaves=Rectangles(nothing, nothing, nothing, nothing),
        row_start=start.repeat(block_size),
        row_end=np.where(keep, start + block_size, 0).repeat(block_size),
        block_size=block_size,
        needed_pairs=pairs,
        executed_pairs=pairs,
    )
