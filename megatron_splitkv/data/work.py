"""Work units shared by processes that know of each other only through files.

A unit (one shard of features, one batch of responses) is a pure function of its inputs: whoever
does it, and however often, writes the same bytes under the same name. So going on after a kill is
doing the units whose file is not there, and several processes need no messages: unit i belongs to
process i modulo their number. Should one of them die, the leader does its units as well.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_splitkv.config import ConfigError

# A process that has left no trace for so long is taken for dead.
PATIENCE_SECONDS = 1800.0
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Worker:
    """One of the processes that share a job, numbered as torchrun numbers them.

    Args:
        rank: of this process, over all nodes.
        world_size: how many processes share the job.
        local_rank: of this process on its node; chooses its GPU.

    Raises:
        ConfigError: a rank that the world does not have.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"RANK {self.rank} does not fit WORLD_SIZE {self.world_size}; start the processes "
                "with torchrun, or unset both for a single one"
            )

    @classmethod
    def from_environment(cls) -> Self:
        """The worker that torchrun's RANK, WORLD_SIZE and LOCAL_RANK name; one process without.

        Raises:
            ConfigError: a variable that is no number.
        """
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        values = [os.environ.get(name) or str(default) for name, default in names.items()]
        for name, value in zip(names, values, strict=True):
            if not value.isdecimal():
                raise ConfigError(f"{name}={value!r} is no number; start the processes by torchrun")
        return cls(*map(int, values))

    @property
    def leads(self) -> bool:
        """Whether this process does what is done once, and speaks for all."""
        return self.rank == 0

    def owns(self, unit: int) -> bool:
        """Whether a unit is this process's own."""
        return unit % self.world_size == self.rank


class Patience:
    """Waits in small steps, and gives up when nothing has changed for long.

    Args:
        limit: seconds without a change.
        clock: monotonic seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        limit: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit = limit
        self._clock, self._sleep = clock, sleep
        self._sign: object = None
        self._since = clock()

    def lasts(self, sign: object) -> bool:
        """Wait a moment; False once `sign` has been the same for longer than the limit."""
        if sign != self._sign:
            self._sign, self._since = sign, self._clock()
        if self._clock() - self._since > self.limit:
            return False
        self._sleep(_POLL_SECONDS)
        return True


def run_units(
    worker: Worker,
    units: int,
    finished: Callable[[int], bool],
    do: Callable[[int], None],
    patience: Callable[[], Patience] = Patience,
) -> None:
    """Do this process's share of the units; the leader returns when all of them are done.

    Followers return after their own. The leader waits for theirs, and does what is missing itself,
    last one first, whenever no unit has been finished for as long as its patience lasts.

    Args:
        worker: this process.
        units: how many there are.
        finished: whether a unit's file is there.
        do: does one unit. A failure counts only if the unit is not finished then: another process
            may have done it in the meantime.
        patience: makes the leader's.
    """

    def attempt(unit: int) -> None:
        try:
            do(unit)
        except (ConfigError, OSError):
            if not finished(unit):
                raise

    for unit in filter(worker.owns, range(units)):
        if not finished(unit):
            attempt(unit)
    if not worker.leads:
        return
    waiting = patience()
    missing = [unit for unit in range(units) if not finished(unit)]
    while missing:
        if not waiting.lasts(len(missing)):
            attempt(missing[-1])
        missing = [unit for unit in missing if not finished(unit)]


class SharedProgress:
    """How far all processes are together, seen from one of them.

    Args:
        sizes: what each unit counts.
        finished: whether a unit's file is there.
        progress: told the sum of finished sizes, and the sum of all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        finished: Callable[[int], bool],
        progress: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes = [int(size) for size in sizes]
        self._finished = finished
        self._progress = progress
        self._clock = clock
        self._total = sum(self._sizes)
        self._open = dict.fromkeys(range(len(self._sizes)))
        self._looked = 0.0
        self._done = 0
        self.look()

    @property
    def units_finished(self) -> int:
        """Units that were there when this process last looked."""
        return len(self._sizes) - len(self._open)

    def finished(self, unit: int) -> bool:
        """Whether a unit is finished; once it was, it is not looked at again."""
        if unit in self._open and self._finished(unit):
            del self._open[unit]
            self._done += self._sizes[unit]
            self.inside(0)
        return unit not in self._open

    def inside(self, part: int) -> None:
        """Tell how much of the unit at hand is done."""
        if self._clock() - self._looked > _LOOK_SECONDS:
            self.look()
        self._progress(min(self._done + part, self._total), self._total)

    def look(self) -> None:
        """Look for the units of others."""
        self._looked = self._clock()
        for unit in [*self._open]:
            self.finished(unit)
