"""The documents of a layout as rows that blocks see, and what the last rows of each cost."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.pricing import FULL_ATTENTION, cumulative_context_work


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of which blocks see something, by position.

    Args:
        start: first row of every document.
        end: end of the rows that are seen: the last anchor.
        work: price of these rows.
        first_block: where the document's blocks begin in `anchors`, and the end of the last.
        anchors: of the blocks that see something, ascending.
        work_before: price of all rows before each anchor.
        of_block: the document of every block of the layout, -1 for one that sees nothing.

    Shape:
        start, end, work int64[D]; first_block int64[D + 1]; anchors, work_before int64[M];
        of_block int64[N].
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    work: NDArray[np.int64]
    first_block: NDArray[np.int64]
    anchors: NDArray[np.int64]
    work_before: NDArray[np.int64]
    of_block: NDArray[np.int64]

    @classmethod
    def of(cls, layout: BlockLayout, windows: Sequence[int | None] = FULL_ATTENTION) -> Self:
        """From the blocks, in any order and with padding, and the layers' windows."""
        sees = layout.block_keep_mask & (layout.anchor_positions > layout.document_starts)
        start, document, count = np.unique(
            layout.document_starts[sees], return_inverse=True, return_counts=True
        )
        of_block = np.full(layout.num_blocks, -1, dtype=np.int64)
        of_block[sees] = document
        anchors = np.sort(layout.anchor_positions[sees])
        work_before = cumulative_context_work(layout, anchors, windows)
        last = np.cumsum(count) - 1
        work = work_before[last] - cumulative_context_work(layout, start, windows)
        first_block = np.append(0, np.cumsum(count))
        return cls(start, anchors[last], work, first_block, anchors, work_before, of_block)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Blocks of every document that see something, int64[D]."""
        return np.diff(self.first_block)

    def tail(self, document: int, end: int, work: int, blocks: int, rows: int) -> tuple[int, int]:
        """The longest range of a document's rows that ends at `end`, within three limits.

        Among all its rows, the last are those that the fewest blocks see for the work that they
        are.

        Args:
            document: which one.
            end: of the range, at most the document's.
            work: most work, not negative.
            blocks: most blocks that see a row of the range.
            rows: most rows.

        Returns:
            (start, work); with sliding windows the work between two anchors is interpolated.
        """
        lists = self._lists
        first, after = lists.first_block[document], lists.first_block[document + 1]
        start = max(lists.start[document], end - max(0, rows))
        if blocks < after - first:
            # As many anchors lie behind this one, and see the row at it.
            start = max(start, lists.anchors[after - 1 - max(0, blocks)])
        start = min(start, end)
        until = self._price_before(document, end)
        least = until - work  # what must lie before the range
        if self._price_before(document, start) >= least:
            return start, until - self._price_before(document, start)
        # Between two anchors every row costs the same: find the two, then the row. As `least` lies
        # between the prices at `start` and `end`, so does the row, and the two prices differ.
        i = bisect_left(lists.work_before, least, first, after)
        left, left_price = self._point_before(document, i)
        right, right_price = lists.anchors[i], lists.work_before[i]
        needed = (least - left_price) * (right - left)
        start = max(start, left - -needed // (right_price - left_price))
        return start, until - self._price_before(document, start)

    def seen_by(self, document: int, row: int) -> int:
        """How many of the document's blocks see the row."""
        lists = self._lists
        after = lists.first_block[document + 1]
        return after - bisect_right(lists.anchors, row, lists.first_block[document], after)

    def _price_before(self, document: int, row: int) -> int:
        """Price of all rows before one of the document, or before its end."""
        lists = self._lists
        first, after = lists.first_block[document], lists.first_block[document + 1]
        i = bisect_left(lists.anchors, row, first, after)
        left, left_price = self._point_before(document, i)
        right, right_price = lists.anchors[i], lists.work_before[i]
        if right == left:
            return left_price
        return left_price + (right_price - left_price) * (row - left) // (right - left)

    def _point_before(self, document: int, i: int) -> tuple[int, int]:
        """(row, price of all rows before it) of the anchor before `anchors[i]`, or of the start."""
        lists = self._lists
        if i > lists.first_block[document]:
            return lists.anchors[i - 1], lists.work_before[i - 1]
        last = lists.first_block[document + 1] - 1
        return lists.start[document], lists.work_before[last] - lists.work[document]

    def first_rows(
        self, chunk_bounds: NDArray[np.int64], chunk_owner: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first row of every document on every rank that holds a row of it which is seen.

        Args:
            chunk_bounds: ascending packed positions from 0 to the context length.
            chunk_owner: the rank of every chunk.

        Returns:
            (rank * D + document, row), by rank and document.

        Shape:
            chunk_bounds int64[C + 1], chunk_owner int64[C] -> int64[k], int64[k].
        """
        start = np.union1d(chunk_bounds, self.start)[:-1]  # of pieces of one chunk and document
        document = np.searchsorted(self.start, start, side="right") - 1
        seen = start < np.append(self.end, 0)[document]
        start, document = start[seen], document[seen]
        # Of chunks that begin at one row the last one holds it: those before are empty.
        rank = chunk_owner[np.searchsorted(chunk_bounds, start, side="right") - 1]
        place, first = np.unique(rank * self.start.size + document, return_index=True)
        return place, start[first]

    @cached_property
    def _lists(self) -> "_Lists":
        return _Lists(
            self.start.tolist(),
            self.work.tolist(),
            self.first_block.tolist(),
            self.anchors.tolist(),
            self.work_before.tolist(),
        )


@dataclass(frozen=True)
class _Lists:
    """Vectors of `Documents` as Python integers: single look-ups are quick, products are exact."""

    start: list[int]
    work: list[int]
    first_block: list[int]
    anchors: list[int]
    work_before: list[int]
