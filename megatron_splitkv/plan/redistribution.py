"""What one rank sends and receives so that context rows come from where they are to their owners.

Found by intersecting the ranges of a source with the chunks of a plan: the cost is that of the
pieces, plus one index for every row that this rank holds or will hold.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.row_source import RowSource


@dataclass(frozen=True, eq=False)
class Redistribution:
    """One rank's part in moving rows: an all-to-all-v of the rows that change their rank, no more.

    "Old" rows are those of the tensor that the rank has, "new" ones those of the tensor that it
    gets. What stays on the rank never travels.

    Args:
        sent_index: old rows in the order in which they leave: for rank 0, for rank 1 and so on.
        sent_rows: how many of them go to each rank; none to this rank itself.
        received_rows: how many come from each rank.
        received_index: the new row of each received one, in the order of arrival.
        kept_old: old rows that stay.
        kept_new: which new rows they become.
        num_old: rows of the tensor before.
        num_new: rows of the tensor after. Those that nothing comes to are padding.

    Shape:
        sent_index int64[sum(sent_rows)]; received_index int64[sum(received_rows)]; sent_rows,
        received_rows int64[P]; kept_old, kept_new int64[k].
    """

    sent_index: NDArray[np.int64]
    sent_rows: NDArray[np.int64]
    received_rows: NDArray[np.int64]
    received_index: NDArray[np.int64]
    kept_old: NDArray[np.int64]
    kept_new: NDArray[np.int64]
    num_old: int
    num_new: int

    @classmethod
    def of(cls, plan: ContextPlan, source: RowSource, rank: int) -> Self:
        """From a source's tensors to `plan.rows(rank)`, ascending.

        Args:
            plan: who shall hold which rows.
            source: who holds them now.
            rank: whose part.

        Raises:
            ConfigError: plan and source are of different contexts or groups.
        """
        start, end, old_range, chunk = _pieces(plan, source)
        lengths = end - start
        old_rank, new_rank = source.owner[old_range], plan.chunk_owner[chunk]
        old_row = source.local_start[old_range] + start - source.start[old_range]
        # New rows are ascending, so they count up over the rank's pieces in global order.
        mine = new_rank == rank
        new_row = np.cumsum(np.where(mine, lengths, 0)) - lengths

        def rows(first: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
            return _expand(first[which], lengths[which])

        def per_rank(ranks: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
            counts = np.zeros(plan.cp_size, dtype=np.int64)
            np.add.at(counts, ranks[which], lengths[which])
            return counts

        leaving = np.flatnonzero((old_rank == rank) & ~mine)
        leaving = leaving[np.argsort(new_rank[leaving], kind="stable")]
        coming = np.flatnonzero(mine & (old_rank != rank))
        coming = coming[np.argsort(old_rank[coming], kind="stable")]
        staying = np.flatnonzero(mine & (old_rank == rank))
        return cls(
            sent_index=rows(old_row, leaving),
            sent_rows=per_rank(new_rank, leaving),
            received_rows=per_rank(old_rank, coming),
            received_index=rows(new_row, coming),
            kept_old=rows(old_row, staying),
            kept_new=rows(new_row, staying),
            num_old=source.num_rows(rank),
            num_new=plan.num_rows(rank),
        )

    def reverse(self) -> Self:
        """The way back; also how gradients go."""
        return type(self)(
            sent_index=self.received_index,
            sent_rows=self.received_rows,
            received_rows=self.sent_rows,
            received_index=self.sent_index,
            kept_old=self.kept_new,
            kept_new=self.kept_old,
            num_old=self.num_new,
            num_new=self.num_old,
        )

    @property
    def fills(self) -> bool:
        """Whether every new row gets its content from somewhere."""
        return self.kept_new.size + self.received_index.size == self.num_new


def rows_moved(plan: ContextPlan, source: RowSource) -> int:
    """Context rows of the whole group that change their rank.

    Raises:
        ConfigError: plan and source are of different contexts or groups.
    """
    start, end, old_range, chunk = _pieces(plan, source)
    moves = source.owner[old_range] != plan.chunk_owner[chunk]
    return int((end - start)[moves].sum())


def _pieces(
    plan: ContextPlan, source: RowSource
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut the context wherever the source's range or the plan's chunk changes.

    Returns:
        (start, end, the source's range, the plan's chunk) of every piece, ascending, none empty.
    """
    if plan.cp_size != source.cp_size:
        raise ConfigError(
            f"the plan is for {plan.cp_size} context-parallel ranks, the rows lie on "
            f"{source.cp_size}; build both with the group's size"
        )
    if plan.context_length != source.context_length:
        raise ConfigError(
            f"the plan covers {plan.context_length} context rows, the source holds "
            f"{source.context_length}; build the plan with that length"
        )
    by_start = np.argsort(source.start, kind="stable")
    by_start = by_start[np.searchsorted(source.start[by_start], 0) :]  # padding goes nowhere
    starts = source.start[by_start]
    cuts = np.union1d(plan.chunk_bounds, starts)
    start, end = cuts[:-1], cuts[1:]
    old_range = by_start[np.searchsorted(starts, start, side="right") - 1]
    # Of chunks that begin at one row the last one holds it: those before are empty.
    chunk = np.searchsorted(plan.chunk_bounds, start, side="right") - 1
    return start, end, old_range, chunk


def _expand(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`lengths[i]` consecutive numbers from `first[i]` on, for all i."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())
