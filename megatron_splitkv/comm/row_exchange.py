"""Rows on their way from their owners to the ranks that need them, and what these send back.

Every rank owns the same number of rows. A cast brings rows to the ranks that attend them; a return
takes one contribution per attended row the other way. Both go by routes that were fixed before any
tensor moved, so no size is ever exchanged and the host waits for nothing.

Where nodes hold several ranks each, returns take two levels. The g ranks of a node first exchange
what they contribute to rows of equally placed ranks of all n nodes and add it up; what is then sent
between nodes is R rows for each other node, where one level would send g R. Contributions in a
group-cast differ from rank to rank and mostly stay on few ranks: they return by one level. Casts
are all-gathers, which bring every row to a node once as they are.

Plain collectives, not differentiable. A cast and a sum of returns are each other's transpose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_splitkv.comm.collectives import (
    Pending,
    all_reduce_sum,
    group_rank,
    group_size,
    launch_all_to_all,
    launch_gather_rows,
)
from megatron_splitkv.comm.pending_sum import PendingSum


@dataclass(frozen=True, eq=False)
class Routes:
    """Which rows go where, if not all to all.

    Args:
        sent_index: this rank's own rows in the order in which they leave: for rank 0, for rank 1
            and so on; all of them for this rank itself.
        sent_rows: how many of them go to each rank.
        received_rows: how many rows this rank attends of each owner; all of its own.
        attended_index: the rows that this rank attends among those of all ranks, ascending.

    Shape:
        sent_index int64[sum(sent_rows)]; attended_index int64[sum(received_rows)].
    """

    sent_index: torch.Tensor
    sent_rows: Sequence[int]
    received_rows: Sequence[int]
    attended_index: torch.Tensor


class RowExchange:
    """Casts and returns over one group by fixed routes.

    Shape legend: R rows that this rank owns, A rows that it attends (of rank 0, then rank 1, ...),
    C contributions to its own rows (by rank 0, then rank 1, ...).

    Args:
        group: the ranks; None for one process.
        own_rows: R.
        routes: None if every rank attends all rows.
        node_ranks: g, neighbours of the group on each node, for two-level returns; 1 for one level.
            With routes there is one level only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        own_rows: int,
        routes: Routes | None = None,
        node_ranks: int = 1,
    ) -> None:
        self.group = group
        self.own_rows = own_rows
        self.routes = None if group_size(group) == 1 else routes
        self._two_levels: tuple[RowExchange, ...] = ()
        if 1 < node_ranks < group_size(group) and routes is None:
            self._two_levels = (
                _InsideNode(group, own_rows, node_ranks),
                _BetweenNodes(group, own_rows, node_ranks),
            )

    @property
    def alone(self) -> bool:
        """Whether there is no other rank: casts and returns then give back what they got."""
        return group_size(self.group) == 1

    @property
    def _senders(self) -> int:
        return group_size(self.group)

    @property
    def attended_rows(self) -> int:
        """A."""
        if self.routes is None:
            return self.own_rows * group_size(self.group)
        return sum(self.routes.received_rows)

    @property
    def attended_index(self) -> torch.Tensor | None:
        """The attended rows among those of all ranks; None if they are all of them."""
        return None if self.routes is None else self.routes.attended_index

    @property
    def own_attended(self) -> slice:
        """This rank's own rows among the attended."""
        rank = group_rank(self.group)
        first = (
            rank * self.own_rows if self.routes is None else sum(self.routes.received_rows[:rank])
        )
        return slice(first, first + self.own_rows)

    def launch_cast(self, own: torch.Tensor, *, label: str) -> Pending:
        """Begin to bring rows to the ranks that attend them.

        Shape:
            ``[R, ...]`` -> ``[A, ...]``.
        """
        if self.routes is None:
            return launch_gather_rows(own, self.group, label=label)
        return launch_all_to_all(
            own.index_select(0, self.routes.sent_index),
            self.group,
            label=label,
            sent_rows=self.routes.sent_rows,
            received_rows=self.routes.received_rows,
        )

    @property
    def levels(self) -> tuple["RowExchange", ...]:
        """The exchanges by which contributions return; what one has brought goes on by the next.

        A level's own rows are what the next one's ranks attend. None where there is no other rank.
        """
        return () if self.alone else self._two_levels or (self,)

    def packed(self, attended: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Attended rows in the order in which a return sends them, in `dtype`; copied if need be.

        Shape:
            ``[A, ...]`` -> ``[A, ...]``.
        """
        return attended if dtype is None else attended.to(dtype)

    def launch_return(self, attended: torch.Tensor, *, label: str) -> Pending:
        """Begin to send what this rank contributes to each attended row to the row's owner.

        One level: `levels` says which.

        Args:
            attended: contributions, as `packed` orders them.
            label: name of the rows for the meter.

        Shape:
            ``[A, ...]`` -> contributions ``[C, ...]``.
        """
        if self.routes is None:
            return launch_all_to_all(attended, self.group, label=label)
        return launch_all_to_all(
            attended,
            self.group,
            label=label,
            sent_rows=self.routes.received_rows,
            received_rows=self.routes.sent_rows,
        )

    def parts(
        self, contributions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """Contributions by the rank that sent them, with the own rows that they are for.

        Yields:
            (own rows, None for all of them in order; what was contributed to these). Within a part
            no row comes twice.
        """
        if self.routes is None:
            for part in contributions.split(self.own_rows) if self.own_rows else ():
                yield None, part
            return
        rank, counts = group_rank(self.group), list(self.routes.sent_rows)
        pairs = zip(self.routes.sent_index.split(counts), contributions.split(counts), strict=True)
        for source, (rows, part) in enumerate(pairs):
            yield (None if source == rank else rows), part

    def sum(self, contributions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Add up contributions in `dtype`, always in the order of the ranks.

        Shape:
            ``[C, ...]`` -> ``[R, ...]``.
        """
        if self.routes is None:
            if self.alone:
                return contributions.to(dtype)
            shards = contributions.unflatten(0, (self._senders, self.own_rows))
            return shards.sum(dim=0, dtype=dtype)
        total = contributions.new_zeros((self.own_rows, *contributions.shape[1:]), dtype=dtype)
        for rows, part in self.parts(contributions):
            if rows is None:
                total += part
            else:
                total.index_add_(0, rows, part.to(dtype))
        return total

    def launch_sum(
        self,
        attended: torch.Tensor,
        *,
        label: str,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> PendingSum:
        """Begin to add up, at the owner of each row, what all ranks contribute to it.

        Args:
            attended: what this rank contributes to each attended row.
            label: name of the rows for the meter.
            wire_dtype: dtype of contributions, and of sums inside nodes, on their way.
            dtype: dtype of every sum.

        Shape:
            ``[A, ...]`` -> ``[R, ...]``.
        """
        return PendingSum(self.levels, attended, label, wire_dtype, dtype)

    def total(self, attended: torch.Tensor, *, label: str) -> torch.Tensor:
        """Sum what all ranks that attend a row hold of it; all of them get the sum.

        Shape:
            ``[A, ...]`` -> ``[A, ...]``.
        """
        if self.routes is None:
            return all_reduce_sum(attended, self.group, label=label)
        own = self.sum(self.launch_return(attended, label=label).wait(), attended.dtype)
        return self.launch_cast(own, label=f"{label}_total").wait()


class _Level(RowExchange):
    """Returns between some ranks of the group; the other ranks do the same among themselves.

    Uneven parts, most of them empty, over the one group: no further groups are needed, and what is
    empty is not sent.

    Args:
        group: the ranks.
        own_rows: of this level.
        peers: with whom this rank exchanges, itself included.
        op: what the meter calls it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, own_rows: int, peers: range, op: str
    ) -> None:
        super().__init__(group, own_rows)
        self._peers, self._op = peers, op
        self._rows = [own_rows * (rank in peers) for rank in range(group_size(group))]

    @property
    def _senders(self) -> int:
        return len(self._peers)

    def launch_return(self, attended: torch.Tensor, *, label: str) -> Pending:
        """See `RowExchange.launch_return`."""
        rows = self._rows
        return launch_all_to_all(
            attended, self.group, label=label, sent_rows=rows, received_rows=rows, op=self._op
        )


class _InsideNode(_Level):
    """First level: own rows are those of all ranks with this one's place on a node, by node."""

    def __init__(self, group: dist.ProcessGroup | None, own_rows: int, node_ranks: int) -> None:
        self._nodes = group_size(group) // node_ranks
        first = group_rank(group) // node_ranks * node_ranks
        peers = range(first, first + node_ranks)
        super().__init__(group, self._nodes * own_rows, peers, "all_to_all_inside")

    def packed(self, attended: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows by the place of their owners, then by node; they come by node, then by place."""
        shape = (self._nodes, len(self._peers), self.own_rows // self._nodes)
        by_place = attended.unflatten(0, shape).transpose(0, 1)
        order = by_place.to(dtype or attended.dtype, memory_format=torch.contiguous_format)
        return order.contiguous().flatten(0, 2)


class _BetweenNodes(_Level):
    """Second level: each node's sums go to the owners of their rows, by ranks of one place."""

    def __init__(self, group: dist.ProcessGroup | None, own_rows: int, node_ranks: int) -> None:
        peers = range(group_rank(group) % node_ranks, group_size(group), node_ranks)
        super().__init__(group, own_rows, peers, "all_to_all_between")
