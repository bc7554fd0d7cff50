"""The second, small part of every query's keys: the rows of its own draft block."""

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.staircase import Rectangles, Staircase


def own_block_staircase(
    keep: NDArray[np.bool_], block_size: int, window: int | None = None
) -> Staircase:
    """Visibility of blocks to themselves.

    Without a window a kept block sees all its B rows, later ones too: one dense level. With a
    window it is causal: a slot sees itself and the `window - 1` slots before it; every block is a
    leaf. Either way a kernel treats these keys like any others.

    Args:
        keep: False for padding blocks, which see nothing.
        block_size: B.
        window: of a sliding-window layer; None for full attention.

    Returns:
        The staircase over these blocks' query rows and equally many key rows.

    Shape:
        keep bool[n].
    """
    kept = np.flatnonzero(keep)
    nothing = np.empty(0, dtype=np.int64)
    none = Rectangles(nothing, nothing, nothing, nothing)
    squares = Rectangles(kept, kept + 1, kept * block_size, (kept + 1) * block_size)
    slot = np.arange(block_size)
    if window is None:
        first, end = np.zeros_like(slot), np.full_like(slot, block_size)
    else:
        first, end = np.maximum(slot - window + 1, 0), slot + 1
    block_start = (np.arange(keep.size) * block_size)[:, None]
    return Staircase(
        levels=[squares] if window is None else [],
        leaves=none if window is None else squares,
        row_start=np.where(keep[:, None], block_start + first, 0).ravel(),
        row_end=np.where(keep[:, None], block_start + end, 0).ravel(),
        block_size=block_size,
        needed_pairs=kept.size * int((end - first).sum()),
        executed_pairs=kept.size * block_size**2,
    )
