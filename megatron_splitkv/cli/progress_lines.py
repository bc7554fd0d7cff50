"""Progress as plain lines: what a log, a pipe or CI gets where a terminal shows bars."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

EVERY_SECONDS = 30.0


@dataclass
class _Stage:
    """What is known of one stage.

    Args:
        name: of it.
        begun: when, in seconds of the clock.
        first: the first report, as (when, done); what was there before does not count for the rate.
        done: items that are finished.
        total: items in all; None before the first report.
        told: what `done` was in the last line.
        finished: whether its last line is written.
    """

    name: str
    begun: float
    first: tuple[float, int] | None = None
    done: int = 0
    total: int | None = None
    told: int = 0
    finished: bool = False


class ProgressLines:
    """Says when a stage begins and ends and, at every beat, how far those are that moved.

    Reports and beats may come from different threads.

    Args:
        write: takes one line.
        clock: seconds since some moment.
    """

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._stages: list[_Stage] = []
        self._latest: _Stage | None = None  # the one that began, or moved, last
        self._lock = threading.Lock()

    def watch(self, name: str) -> Callable[[int, int], None]:
        """Say that a stage begins.

        Args:
            name: of the stage.

        Returns:
            What it calls with the items that are done and all of them.
        """
        stage = _Stage(name, self._clock())

        def report(done: int, total: int) -> None:
            with self._lock:
                self._report(stage, done, total)

        with self._lock:
            self._stages.append(stage)
            self._latest = stage
            self._write(f"{name}: begins")
        return report

    def beat(self) -> None:
        """Say how far the stages are that moved; if none did, that the latest is still at work."""
        with self._lock:
            open_stages = [stage for stage in self._stages if not stage.finished]
            moved = [stage for stage in open_stages if stage.done != stage.told]
            for stage in moved or [stage for stage in open_stages if stage is self._latest]:
                stage.told = stage.done
                self._write(self._line(stage))

    def _report(self, stage: _Stage, done: int, total: int) -> None:
        now = self._clock()
        if stage.first is None:
            stage.first, stage.told = (now, done), done
        self._latest = stage
        stage.done, stage.total = done, total
        if done >= total and not stage.finished:
            stage.finished = True
            self._write(
                f"{stage.name}: {done:,}/{total:,} done in {_clock_time(now - stage.begun)}"
            )

    def _line(self, stage: _Stage) -> str:
        now = self._clock()
        so_far = _clock_time(now - stage.begun)
        if stage.first is None or stage.total is None:
            return f"{stage.name}: at work for {so_far}"
        since, before = stage.first
        parts = [f"{stage.name}: {stage.done:,}/{stage.total:,} after {so_far}"]
        if stage.done > before and now > since:
            rate = (stage.done - before) / (now - since)
            parts.append(f"{rate:,.0f}/s" if rate >= 1 else f"{60 * rate:,.1f}/min")
            parts.append(f"about {_clock_time((stage.total - stage.done) / rate)} left")
        return ", ".join(parts)


@contextmanager
def progress_lines(
    write: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], bool] | None = None,
) -> Iterator[ProgressLines]:
    """Lines that keep coming every `EVERY_SECONDS` while the body runs.

    Args:
        write: takes one line.
        clock: seconds since some moment.
        wait: sleeps for so many seconds and returns whether the body has ended; None for real time.
    """
    lines = ProgressLines(write, clock)
    ended = threading.Event()
    sleep = ended.wait if wait is None else wait

    def keep_beating() -> None:
        while not sleep(EVERY_SECONDS):
            lines.beat()

    thread = threading.Thread(target=keep_beating, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


def _clock_time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
