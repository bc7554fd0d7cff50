"""Which draft blocks lie with which rank: in their order, or dealt out by what they see.

Where keys go to the queries, a rank computes what its own blocks see, and blocks with late anchors
see more: ranks with consecutive blocks then wait for the last one, whatever the rows' plan. Dealt
out to and fro by what they see, all ranks have about the same.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout


def mirrored_order(layout: BlockLayout, cp_size: int) -> NDArray[np.int64]:
    """The blocks by rank, for a layout whose consecutive N / P blocks are a rank's.

    Those that see most go to ranks 0 to P - 1, the next ones to P - 1 down to 0, and so on: of any
    2P neighbours in that order a rank has the p-th from the front and from the back. Any documents
    and anchors are evened out: two ranks differ by what one block sees at most. Padding blocks see
    nothing and come last. A rank has its own ones by document and anchor, so that they are one
    staircase.

    Args:
        layout: the blocks, a multiple of `cp_size` of them.
        cp_size: P.

    Returns:
        Which block of `layout` comes i-th; blocks i N / P to (i + 1) N / P are rank i's.

    Shape:
        int64[N].
    """
    seen = np.where(layout.block_keep_mask, layout.anchor_positions - layout.document_starts, -1)
    by_work = np.argsort(-seen, kind="stable").reshape(-1, cp_size)
    by_work[1::2] = by_work[1::2, ::-1]
    return np.sort(by_work, axis=0).T.ravel()
