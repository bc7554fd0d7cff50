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
from megatron_splitkv.comm.topology import NodeTopology


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
        topology: of the group, for two-level returns; None for one level. Without routes only.
    """

    _RETURN = "all_to_all"  # what the meter calls it

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        own_rows: int,
        routes: Routes | None = None,
        topology: NodeTopology | None = None,
    ) -> None:
        self.group = group
        self.own_rows = own_rows
        self.routes = None if group_size(group) == 1 else routes
        self._two_levels: tuple[RowExchange, ...] = ()
        if topology is not None and routes is None:
            self._two_levels = (_InsideNode(topology, own_rows), _BetweenNodes(topology, own_rows))

    @property
    def alone(self) -> bool:
        """Whether there is no other rank: casts and returns then give back what they got."""
        return group_size(self.group) == 1

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
            return launch_all_to_all(attended, self.group, label=label, op=self._RETURN)
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
            shards = contributions.unflatten(0, (group_size(self.group), self.own_rows))
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
    ) -> "PendingSum":
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


class _InsideNode(RowExchange):
    """First level: own rows are those of all ranks with this one's place on a node, by node."""

    _RETURN = "all_to_all_inside"

    def __init__(self, topology: NodeTopology, own_rows: int) -> None:
        self._nodes = group_size(topology.peer_group)
        super().__init__(topology.node_group, self._nodes * own_rows)

    def packed(self, attended: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows by the place of their owners, then by node; they come by node, then by place."""
        shape = (self._nodes, group_size(self.group), self.own_rows // self._nodes)
        by_place = attended.unflatten(0, shape).transpose(0, 1)
        order = by_place.to(dtype or attended.dtype, memory_format=torch.contiguous_format)
        return order.contiguous().flatten(0, 2)


class _BetweenNodes(RowExchange):
    """Second level: each node's sums go to the owners of their rows."""

    _RETURN = "all_to_all_between"

    def __init__(self, topology: NodeTopology, own_rows: int) -> None:
        super().__init__(topology.peer_group, own_rows)


class PendingSum:
    """A launched sum of contributions; `wait` is `Pending`'s.

    Of two levels the second can only send what the first has brought. On a GPU that wait, the sum
    and the second level are enqueued at once on a stream of their own, so both levels travel behind
    what the caller computes; the host waits for nothing. On a CPU the second begins in `wait`.

    Args:
        levels: of the exchange.
        attended: see `RowExchange.launch_sum`, as the arguments after it.
        label: name of the rows.
        wire_dtype: dtype on the way.
        dtype: dtype of sums.
    """

    def __init__(
        self,
        levels: tuple[RowExchange, ...],
        attended: torch.Tensor,
        label: str,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self._levels, self._label = levels, label
        self._wire_dtype, self._dtype = wire_dtype, dtype
        self._total: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._done: torch.cuda.Event | None = None
        if not levels:
            self._total = attended.to(dtype)
            return
        self._pending = self._launch(levels[0], attended)
        side = _side_stream(attended.device) if len(levels) > 1 else None
        if side is not None:
            self._run_on(side)

    def wait(self) -> torch.Tensor:
        """The sums of this rank's own rows; on a GPU the current stream waits, not the host."""
        total = self._finish()
        if self._done is not None:
            stream = torch.cuda.current_stream(total.device)
            stream.wait_event(self._done)
            total.record_stream(stream)
            self._done = None
        return total

    def _launch(self, level: RowExchange, rows: torch.Tensor) -> Pending:
        return level.launch_return(level.packed(rows, self._wire_dtype), label=self._label)

    def _finish(self) -> torch.Tensor:
        if self._total is None:
            first, *others = self._levels
            assert self._pending is not None
            total, self._pending = first.sum(self._pending.wait(), self._dtype), None
            for level in others:
                total = level.sum(self._launch(level, total).wait(), self._dtype)
            self._total = total
        return self._total

    def _run_on(self, side: torch.cuda.Stream) -> None:
        assert self._pending is not None
        # The allocator must not hand these out again before the side stream is done with them.
        for tensor in (self._pending.sent, self._pending.result):
            if tensor is not None:
                tensor.record_stream(side)
        with torch.cuda.stream(side):
            self._finish()
        self._done = side.record_event()


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which second levels are enqueued; None where nothing is enqueued."""
    if device.type != "cuda":
        return None
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
