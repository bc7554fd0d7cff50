"""Count what collectives move: elements, bytes and calls, exactly and per tensor.

Convention (the one in which communication volumes are published): elements that one of P ranks
sends, with bandwidth-optimal algorithms. An all-gather or all-to-all of `n` elements in total sends
n (P - 1) / P, as does a broadcast or a reduction of `n` elements, whoever owns them; an all-reduce
of `n` elements 2 n (P - 1) / P; a shift along a ring and an uneven exchange what this rank sends to
others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Args:
        op: ``all_gather``, ``all_gather_v``, ``all_to_all``, ``all_to_all_v``, ``all_reduce_max``,
            ``all_reduce_sum``, ``broadcast``, ``reduce_sum`` or ``shift``; of two-level returns
            ``all_to_all_inside`` (nodes) and ``all_to_all_between`` (them).
        label: which tensor moved, e.g. ``q`` or ``lse_max``.
        elements: elements that this rank sends.
        dtype: dtype on the wire.
    """

    op: str
    label: str
    elements: float
    dtype: torch.dtype

    @property
    def bytes(self) -> float:
        """Bytes that this rank sends."""
        return self.elements * self.dtype.itemsize


@dataclass
class CommMeter:
    """Context manager that records every collective of this process while it is entered.

    `events` tells in which order collectives were launched and waited for, as (stage, label): that
    is how overlap is tested.

    Backward passes inside the region count too, on whichever thread autograd runs them. Meters
    nest; each sees everything. Without an entered meter nothing is recorded.

    Example:
        >>> with CommMeter() as meter:
        ...     context_parallel_attention(q, k, v, plan, cp_group).sum().backward()
        >>> meter.bytes(), meter.elements(label="q"), meter.calls(op="all_reduce_max")
    """

    records: list[Collective] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)

    def elements(self, *, op: str | None = None, label: str | None = None) -> float:
        """Sum of elements sent by this rank, of one `op` or `label` if given."""
        return sum(record.elements for record in self._select(op, label))

    def bytes(self, *, op: str | None = None, label: str | None = None) -> float:
        """Sum of bytes sent by this rank, of one `op` or `label` if given."""
        return sum(record.bytes for record in self._select(op, label))

    def calls(self, *, op: str | None = None, label: str | None = None) -> int:
        """Number of collectives, of one `op` or `label` if given."""
        return len(self._select(op, label))

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self.records.clear()
        self.events.clear()

    def note(self, collective: Collective) -> None:
        """Take in a collective, right after it was launched; one that blocks, after it ended."""
        self.records.append(collective)

    def note_event(self, stage: str, label: str) -> None:
        """Take in what `mark` says."""
        self.events.append((stage, label))

    def _select(self, op: str | None, label: str | None) -> list[Collective]:
        return [r for r in self.records if op in (None, r.op) and label in (None, r.label)]

    def __enter__(self) -> Self:
        _ENTERED.append(self)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # By identity: dataclasses compare by value, and two meters may have seen the same.
        _ENTERED[:] = [meter for meter in _ENTERED if meter is not self]


# A plain list, not thread-local: autograd runs CUDA backwards on threads of its own.
_ENTERED: list[CommMeter] = []

_SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather": lambda n, p: n * (p - 1) / p,
    "all_gather_v": lambda n, p: float(n),
    "all_to_all": lambda n, p: n * (p - 1) / p,
    "all_to_all_v": lambda n, p: float(n),
    "all_to_all_inside": lambda n, p: float(n),
    "all_to_all_between": lambda n, p: float(n),
    "all_reduce_max": lambda n, p: 2 * n * (p - 1) / p,
    "all_reduce_sum": lambda n, p: 2 * n * (p - 1) / p,
    "broadcast": lambda n, p: n * (p - 1) / p,
    "reduce_sum": lambda n, p: n * (p - 1) / p,
    "shift": lambda n, p: float(n),
}


def record(op: str, label: str, numel: int, dtype: torch.dtype, group_size: int) -> None:
    """Note one collective in all entered meters.

    Args:
        op: one of the ops of `Collective`.
        label: which tensor moved.
        numel: elements of the whole buffer: gathered, exchanged, broadcast or reduced; of a shift
            and of the uneven ops and levels those for other ranks.
        dtype: dtype on the wire.
        group_size: P.
    """
    if _ENTERED:
        collective = Collective(op, label, _SENT[op](numel, group_size), dtype)
        for meter in _ENTERED:
            meter.note(collective)


def mark(stage: str, label: str) -> None:
    """Note an event in all entered meters.

    Args:
        stage: ``launch`` or ``wait``; tests add their own for computation.
        label: which tensor.
    """
    for meter in _ENTERED:
        meter.note_event(stage, label)
