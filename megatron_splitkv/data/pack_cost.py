"""What a document costs in training, from its length alone: to deal packs out evenly.

Anchors are expected values: uniform over the document, as if every token were supervised. Costs are
whole numbers of floating-point operations, so that sums of them are the same on every machine.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PackCost:
    """Floating-point operations of a drafter's training step, forward and backward.

    Args:
        context_row: of a context row in all linear layers.
        draft_row: of a draft row in all linear layers, the target's head included.
        pair: of a query-key pair in one layer of attention.
        block_size: B, draft rows of an anchor.
        num_anchors: that are drawn in a document at most.
        windows: of the layers; None is full attention.
    """

    context_row: int
    draft_row: int
    pair: int
    block_size: int
    num_anchors: int
    windows: tuple[int | None, ...]

    def of_documents(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cost of each document.

        Args:
            lengths: tokens.

        Shape:
            int64 ``[D]`` to int64 ``[D]``.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        anchors = np.clip(tokens - 1, 0, self.num_anchors)
        pairs = np.zeros_like(tokens)
        for window, layers in Counter(self.windows).items():
            pairs += layers * expected_pairs(tokens, anchors, self.block_size, window)
        rows = anchors * self.block_size
        return tokens * self.context_row + rows * self.draft_row + pairs * self.pair


def expected_pairs(
    lengths: NDArray[np.int64],
    anchors: NDArray[np.int64],
    block_size: int,
    window: int | None,
) -> NDArray[np.int64]:
    """Query-key pairs of a layer, on average over the draws of the anchors, rounded down.

    An anchor is any of the positions 0 to n - 2. A slot sees the context before its anchor and its
    own block; with a window, slot k sees the W - 1 - k positions before the anchor at most, and
    itself with the W - 1 slots before it.

    Args:
        lengths: tokens n of each document.
        anchors: drawn in each of them, at most n - 1.
        block_size: B.
        window: W, or None for full attention.

    Shape:
        int64 ``[D]``.
    """
    places = np.maximum(lengths - 1, 1)
    if window is None:
        context = block_size * (places * (places - 1) // 2)  # over all places
        own = block_size**2
    else:
        slots = np.arange(block_size)
        context = np.zeros_like(places)
        for reach in np.maximum(window - 1 - slots, 0).tolist():
            short = np.minimum(places, reach)  # places that see all that is before them
            context += short * (short - 1) // 2 + (places - short) * reach
        own = int(np.minimum(slots + 1, window).sum())
    # Quotient and remainder apart: the product with all places might not fit 64 bits.
    mean, rest = np.divmod(context, places)
    return anchors * (mean + own) + anchors * rest // places
