"""A machine's time from a run on another: computation is measured, communication is priced.

Ranks that share cores and talk over loopback cannot show what a strategy takes on a cluster: they
wait for cores, and a transfer is a copy. So a `VirtualClock` notes, on every rank, when the rank
launched a collective, waited for one or began another phase, in CPU-seconds of its own thread:
seconds in which it computed, whoever else wanted the core. `replay` then runs these timelines with
a core for each rank and with the links of a machine. The order of launches and waits is that of the
code that ran, so overlap, serial hops, stragglers and imbalance come out as they would there.

In a replay a transfer begins when all who take part have launched it and their links are free, and
ends after the seconds that `Links` gives it; a rank that waits for it goes on then. Transfers of a
rank follow one another in the order of their launches, as on a communication stream. Neighbours'
shifts occupy one direction of two ranks, all else both directions of all ranks.

Source:
    Trace-driven simulation of message passing, as in Dimemas (Badia et al., 2003) and LogGOPSim
    (Hoefler, Schneider and Lumsdaine, 2010).
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megatron_splitkv.comm.links import Links
from megatron_splitkv.comm.meter import Collective, CommMeter

Clock = Callable[[], float]


@dataclass(frozen=True)
class Moment:
    """Something that a rank did.

    Args:
        at: reading of its clock, seconds.
        kind: ``launch`` of a collective, ``wait`` for the oldest launched one of that label,
            ``phase`` (what is computed from here on), ``begin`` or ``end``.
        label: the tensor or the phase.
        collective: what was launched.
        blocking: launched and waited for at once.
    """

    at: float
    kind: str
    label: str = ""
    collective: Collective | None = None
    blocking: bool = False


Timeline = Sequence[Moment]
"""Moments of one rank in their order, from ``begin`` to ``end``."""


@dataclass
class VirtualClock(CommMeter):
    """A meter that notes when, too. Enter it on every rank; `mark("phase", name)` names phases.

    Transfers of one label must be waited for in the order of their launches, every one of them.

    Args:
        now: a clock that stands still while the rank waits: CPU-seconds of the calling thread. A
            backward on the CPU runs on that thread as well.
        moments: what happened so far.

    Example:
        >>> with VirtualClock() as clock:
        ...     attention(q, k, v).backward(grad_out)
        >>> timelines = gather_objects(clock.moments)  # of all ranks
        >>> replay(timelines, links, slowdown=5000).seconds
    """

    now: Clock = time.thread_time
    moments: list[Moment] = field(default_factory=list)

    def __enter__(self) -> "VirtualClock":
        super().__enter__()
        self.moments.append(Moment(self.now(), "begin"))
        return self

    def __exit__(self, *exception: object) -> None:
        self.moments.append(Moment(self.now(), "end"))
        super().__exit__(*exception)  # type: ignore[arg-type]

    def note(self, collective: Collective) -> None:
        """See `CommMeter.note`: blocking unless a mark says at once that it was only launched."""
        super().note(collective)
        self.moments.append(
            Moment(self.now(), "launch", collective.label, collective, blocking=True)
        )

    def note_event(self, stage: str, label: str) -> None:
        """See `CommMeter.note_event`."""
        super().note_event(stage, label)
        if stage == "launch":
            self.moments[-1] = replace(self.moments[-1], blocking=False)
        elif stage in ("wait", "phase"):
            self.moments.append(Moment(self.now(), stage, label))


@dataclass(frozen=True)
class Span:
    """What a rank did for a while.

    Args:
        start: seconds since all ranks began.
        end: seconds since all ranks began.
        kind: ``compute`` or ``wait``.
        label: the phase, or the tensor that was waited for.
    """

    start: float
    end: float
    kind: str
    label: str

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Schedule:
    """A replay: spans of every rank, without gaps."""

    spans: list[list[Span]]

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def spent(self, rank: int, kind: str, label: str | None = None) -> float:
        """Seconds that a rank computed or waited, of one label if given."""
        return sum(
            s.seconds for s in self.spans[rank] if s.kind == kind and label in (None, s.label)
        )


def replay(
    timelines: Sequence[Timeline],
    links: Links,
    *,
    slowdown: float = 1.0,
    bytes_factor: float = 1.0,
    pace: Mapping[str, float] = {},
) -> Schedule:
    """Run the timelines of all ranks of a group with a core each and with a machine's links.

    Args:
        timelines: by rank; all launch the same collectives in the same order.
        links: what transfers take.
        slowdown: factor on the seconds of transfers, for ranks that compute so much slower than
            those of the machine: bytes and latencies per operation are then the machine's.
        bytes_factor: factor on what was sent, for a run that stands for a larger one.
        pace: factor on the seconds computed in a phase; 1 where it is not named.

    Raises:
        ValueError: ranks launched different collectives, or wait for one that was never launched.
    """
    return _Replay(timelines, links, slowdown, bytes_factor, pace).run()


def transfer_seconds(links: Links, op: str, sent: Sequence[float]) -> float:
    """Seconds of one collective of all ranks.

    Uneven ones last as long as if all ranks sent what the busiest does.

    Args:
        links: the machine.
        op: one of the ops of `Collective` but ``shift``.
        sent: bytes by rank, in the convention of `comm.meter`.

    Raises:
        ValueError: another op, as those of a part of the group.
    """
    most = max(sent)
    # An empty tensor is not sent.
    return links.collective_seconds(op, most, len(sent)) if most else 0.0


# A rank between two waits: yields the number of the collective it waits for, is sent its end.
_Runner = Generator[int, float, None]


class _Replay:
    def __init__(
        self,
        timelines: Sequence[Timeline],
        links: Links,
        slowdown: float,
        bytes_factor: float,
        pace: Mapping[str, float],
    ) -> None:
        self.links = links
        self.slowdown = slowdown
        self.bytes_factor = bytes_factor
        self.pace = pace
        self.timelines = timelines
        self.spans: list[list[Span]] = [[] for _ in timelines]
        # Launches by rank, ends by collective and then by rank.
        self.launches: list[list[tuple[float, Collective]]] = [[] for _ in timelines]
        self.ends: list[list[float]] = []
        self.sending = [0.0] * len(timelines)  # until when each rank's links are taken
        self.receiving = [0.0] * len(timelines)

    def run(self) -> Schedule:
        runners = [self._run(rank) for rank in range(len(self.timelines))]
        waiting: dict[int, int] = {}  # by rank: the number of the collective that it waits for
        for rank, runner in enumerate(runners):
            with suppress(StopIteration):
                waiting[rank] = next(runner)
        while waiting:
            # All ranks have launched what the hindmost waits for: they wait for later ones.
            number = min(waiting.values())
            self._resolve(number)
            for rank in [rank for rank, n in waiting.items() if n == number]:
                del waiting[rank]
                with suppress(StopIteration):
                    waiting[rank] = runners[rank].send(self.ends[number][rank])
        return Schedule(self.spans)

    def _run(self, rank: int) -> _Runner:
        now, phase, before = 0.0, "", self.timelines[rank][0].at
        launched: defaultdict[str, deque[int]] = defaultdict(deque)
        for moment in self.timelines[rank]:
            computed = (moment.at - before) * self.pace.get(phase, 1.0)
            before = moment.at
            now = self._span(rank, now, now + computed, "compute", phase)
            if moment.kind == "phase":
                phase = moment.label
            if moment.collective is not None:
                launched[moment.label].append(len(self.launches[rank]))
                self.launches[rank].append((now, moment.collective))
            if moment.kind == "wait" or moment.blocking:
                if not launched[moment.label]:
                    raise ValueError(f"rank {rank} waits for {moment.label!r}, never launched")
                end = yield launched[moment.label].popleft()
                now = self._span(rank, now, max(now, end), "wait", moment.label)

    def _span(self, rank: int, start: float, end: float, kind: str, label: str) -> float:
        if end > start:
            self.spans[rank].append(Span(start, end, kind, label))
        return end

    def _resolve(self, number: int) -> None:
        """Find out when all collectives up to this one end."""
        for i in range(len(self.ends), number + 1):
            launches = [of_rank[i] for of_rank in self.launches if len(of_rank) > i]
            kinds = {(c.op, c.label) for _, c in launches}
            if len(launches) < len(self.launches) or len(kinds) != 1:
                raise ValueError(f"ranks launched different collectives: {sorted(kinds)} as no {i}")
            began = [at for at, _ in launches]
            sent = [self.bytes_factor * c.bytes for _, c in launches]
            (op, _), *_ = kinds
            self.ends.append(
                self._shift(began, sent) if op == "shift" else self._all(op, began, sent)
            )

    def _all(self, op: str, began: list[float], sent: list[float]) -> list[float]:
        start = max(*began, *self.sending, *self.receiving)
        end = start + self.slowdown * transfer_seconds(self.links, op, sent)
        self.sending = [end] * len(began)
        self.receiving = [end] * len(began)
        return [end] * len(began)

    def _shift(self, began: list[float], sent: list[float]) -> list[float]:
        ranks = len(began)
        for source in range(ranks):
            if sent[source] == 0:
                continue
            target = (source + 1) % ranks
            start = max(began[source], began[target], self.sending[source], self.receiving[target])
            hop = self.links.ring_hop_seconds(sent[source], ranks)
            self.sending[source] = self.receiving[target] = start + self.slowdown * hop
        # A rank is done with a shift when its own rows are gone and the others there.
        return [max(began[r], self.sending[r], self.receiving[r]) for r in range(ranks)]
