"""Which query blocks travel to which rank: to all of them, or only where their keys are."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class QueryCast:
    """The blocks that one rank attends, and what it exchanges with the others to get them.

    A rank attends its own blocks and those of others that it was sent. What it computes for a block
    goes back to the owner by the same routes.

    Args:
        blocks: blocks that this rank attends, its own included, ascending in layout order, hence
            by owner.
        own: this rank's blocks among them.
        received: how many of `blocks` each rank owns.
        sent: for each rank, which of this rank's own blocks it attends, counted from the rank's
            first; all of them for this rank itself.
        everything: all ranks attend all blocks.

    Shape:
        blocks int64[n]; received int64[P]; sent P vectors int64.
    """

    blocks: NDArray[np.int64]
    own: slice
    received: NDArray[np.int64]
    sent: tuple[NDArray[np.int64], ...]
    everything: bool

    @classmethod
    def of_all(cls, rank: int, cp_size: int, blocks_per_rank: int) -> Self:
        """Every rank attends every block."""
        own = np.arange(blocks_per_rank, dtype=np.int64)
        return cls(
            blocks=np.arange(cp_size * blocks_per_rank, dtype=np.int64),
            own=slice(rank * blocks_per_rank, (rank + 1) * blocks_per_rank),
            received=np.full(cp_size, blocks_per_rank, dtype=np.int64),
            sent=(own,) * cp_size,
            everything=True,
        )

    @classmethod
    def of_needs(cls, rank: int, needs: NDArray[np.bool_]) -> Self:
        """Every rank attends the blocks that it needs.

        Args:
            rank: whose cast.
            needs: whether a rank holds keys that a block sees.

        Shape:
            needs bool[P, N].
        """
        cp_size, num_blocks = needs.shape
        per_rank = num_blocks // cp_size
        attended = needs[rank].copy()
        attended[rank * per_rank : (rank + 1) * per_rank] = True
        blocks = np.flatnonzero(attended)
        received = attended.reshape(cp_size, per_rank).sum(axis=1, dtype=np.int64)
        first = int(received[:rank].sum())
        wanted = needs[:, rank * per_rank : (rank + 1) * per_rank].copy()
        wanted[rank] = True
        return cls(
            blocks=blocks,
            own=slice(first, first + per_rank),
            received=received,
            sent=tuple(np.flatnonzero(row) for row in wanted),
            everything=False,
        )
