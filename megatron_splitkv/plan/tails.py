"""Even work and even rows between groups of ranks, by giving away the tails of documents.

The last rows of a document are seen by the few blocks whose anchors lie behind them. A group that
takes them needs those blocks' queries and no others, and it can take much work so: of anchors that
are spread evenly, the last part x of a document's blocks sees a part x^2 of its work alone.

Shape legend: P ranks, G groups, D documents with work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.documents import Documents
from megatron_splitkv.plan.rank_groups import RankGroups

# Documents of a group that may give a tail: the costliest.
_GIVING_DOCUMENTS = 8
# Groups that take from one, those that miss most.
_TAKERS = 8
# Less than this part of a rank's even share of work or rows is not worth the queries.
_WORTH_GIVING = 1000
# Who takes work takes cheap rows, many of them. What is more than this percentage of an even share
# it gives back as tails of its own, and then takes the work that went with them.
_EVEN_ROWS = 106
_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Pieces:
    """Ranges of rows that blocks see, each in a group of ranks.

    Args:
        start, end, group: of every piece, by position, none empty.
        work: of every group, that of its ranks' own blocks included; approximate with windows.
        rows: of every group.
        blocks: how many blocks see a row of the group.

    Shape:
        start, end, group int64[R]; work, rows, blocks int64[G].
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    group: NDArray[np.int64]
    work: NDArray[np.int64]
    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(frozen=True)
class TakingLimits:
    """Up to what a group takes tails.

    Args:
        rows: of a rank, on average over its group.
        blocks: that see a row of the group.
    """

    rows: int
    blocks: int


def even_pieces(
    documents: Documents,
    groups: RankGroups,
    own_work: NDArray[np.int64],
    context_length: int,
    limits: TakingLimits,
) -> Pieces:
    """Give tails from groups that have too much to groups that have too little; deterministic.

    Args:
        documents: all with work.
        groups: where they are.
        own_work: work that every rank has anyway.
        context_length: S, for what an even share of rows is.
        limits: that no group exceeds by taking.

    Shape:
        own_work int64[P].
    """
    exchange = _Exchange(documents, groups, own_work, context_length, limits)
    for _ in range(_ROUNDS):
        exchange.even_rows()
        exchange.even_work()
    return exchange.pieces()


class _Exchange:
    """Who has what, while tails change hands. Python integers throughout."""

    def __init__(
        self,
        documents: Documents,
        groups: RankGroups,
        own_work: NDArray[np.int64],
        context_length: int,
        limits: TakingLimits,
    ) -> None:
        self._documents = documents
        self._group_of = groups.group_of
        self._end: list[int] = documents.end.tolist()
        self._given: list[tuple[int, int, int]] = []  # (start, end, group)
        self._depth: dict[tuple[int, int], int] = {}  # blocks of (group, document it took from)

        own = np.add.reduceat(own_work, groups.first_rank)
        self._work: list[int] = (groups.sums(documents.work) + own).tolist()
        self._rows: list[int] = groups.sums(documents.end - documents.start).tolist()
        self._blocks: list[int] = groups.sums(documents.blocks).tolist()

        size, cp_size, work = groups.size.tolist(), own_work.size, sum(self._work)
        self._work_share = [work * ranks // cp_size for ranks in size]
        self._row_share = [context_length * ranks // cp_size for ranks in size]
        self._most_rows = [limits.rows * ranks for ranks in size]
        self._most_blocks = limits.blocks
        self._least_work = work // (cp_size * _WORTH_GIVING)
        self._least_rows = context_length // (cp_size * _WORTH_GIVING)

        self._givers: list[list[int]] = [[] for _ in size]
        for document in np.argsort(-documents.work, kind="stable").tolist():
            mine = self._givers[self._group_of[document]]
            if len(mine) < _GIVING_DOCUMENTS:
                mine.append(document)

    def even_work(self) -> None:
        """Groups with more work than their share give to those with less."""
        excess = [work - share for work, share in zip(self._work, self._work_share, strict=True)]
        self._even(excess, [-work for work in excess], self._least_work, by_work=True)

    def even_rows(self) -> None:
        """Groups with clearly more rows than their share give to those with fewer than theirs."""
        shares = list(zip(self._rows, self._row_share, strict=True))
        excess = [rows - share * _EVEN_ROWS // 100 for rows, share in shares]
        missing = [share - rows for rows, share in shares]
        self._even(excess, missing, self._least_rows, by_work=False)

    def _even(self, excess: list[int], missing: list[int], least: int, *, by_work: bool) -> None:
        """Who has most gives to those that miss most, as long as it is more than `least`."""
        for giver in _falling(excess):
            if excess[giver] <= least:
                break
            for taker in _falling(missing)[:_TAKERS]:
                while min(excess[giver], missing[taker]) > least:
                    most = min(excess[giver], missing[taker])
                    moved = self._give(giver, taker, most, by_work=by_work)
                    if not moved:
                        break
                    excess[giver] -= moved
                    missing[taker] -= moved

    def pieces(self) -> Pieces:
        """What it came to."""
        given = np.array(self._given, dtype=np.int64).reshape(-1, 3)
        start = np.concatenate([self._documents.start, given[:, 0]])
        end = np.concatenate([np.array(self._end, dtype=np.int64), given[:, 1]])
        group = np.concatenate([self._group_of, given[:, 2]])
        filled = np.flatnonzero(start < end)
        order = filled[np.argsort(start[filled])]
        return Pieces(
            start[order],
            end[order],
            group[order],
            np.array(self._work, dtype=np.int64),
            np.array(self._rows, dtype=np.int64),
            np.array(self._blocks, dtype=np.int64),
        )

    def _give(self, giver: int, taker: int, most: int, *, by_work: bool) -> int:
        """Move the tail of one document: the one that gives most, then adds the fewest blocks.

        Args:
            giver: a group.
            taker: another.
            most: to move of work, or else of rows.
            by_work: which.

        Returns:
            How much of it moved; 0 if no tail is worth it.
        """
        if by_work:
            most_work, most_rows = most, self._most_rows[taker] - self._rows[taker]
        else:
            most_work, most_rows = self._work[giver], most
        best, least = None, self._least_work if by_work else self._least_rows
        for document in self._givers[giver]:
            known, end = self._depth.get((taker, document), 0), self._end[document]
            most_blocks = self._most_blocks - self._blocks[taker] + known
            start, work = self._documents.tail(document, end, most_work, most_blocks, most_rows)
            amount = work if by_work else end - start
            if amount > least:
                added = self._documents.seen_by(document, start) - known
                if best is None or (amount, -added) > best[:2]:
                    best = amount, -added, document, start, work
        if best is None:
            return 0
        amount, fewer, document, start, work = best
        rows = self._end[document] - start
        self._given.append((start, self._end[document], taker))
        self._end[document] = start
        self._depth[taker, document] = self._depth.get((taker, document), 0) - fewer
        self._blocks[taker] -= fewer
        for table, moved in ((self._work, work), (self._rows, rows)):
            table[giver] -= moved
            table[taker] += moved
        return amount


def _falling(values: list[int]) -> list[int]:
    """Indices by falling value; equal ones as they are."""
    return sorted(range(len(values)), key=lambda i: -values[i])
