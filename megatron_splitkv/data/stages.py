"""Stages of a long command: which one runs, how far it is, how long each took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_splitkv.data.target import Progress, silent


def _keep_quiet(line: str) -> None:
    """The `Stages.say` of callers who do not watch."""


@dataclass
class Stages:
    """Tells a watcher which stage runs and how far it is, and keeps the wall seconds of each.

    Args:
        watch: called with a stage's name when it starts; returns the stage's `Progress`.
        say: called with a line for people, such as what was found of an earlier run.

    Attributes:
        seconds: of the stages that this process has finished, by name.
    """

    watch: Callable[[str], Progress] = lambda name: silent
    say: Callable[[str], None] = _keep_quiet
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Run one stage."""
        start = time.perf_counter()
        yield self.watch(name)
        self.seconds[name] = round(time.perf_counter() - start, 2)
