"""Interleaved timing: every repeat runs all methods, so that what slows the machine slows all.

CPU-seconds (of all threads of this process) are the measure that busy neighbours disturb least;
wall seconds stand beside them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PHASES = ("forward", "backward", "total")
CLOCKS = ("cpu", "wall")
_RESAMPLES = 10_000


class Method(Protocol):
    """One way to compute the same thing."""

    def forward(self) -> Any:
        """Compute the output; what it returns is handed to `backward`."""
        ...

    def backward(self, state: Any) -> Any:
        """Compute the gradients."""
        ...


@dataclass(frozen=True)
class Spread:
    """Median and range over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Spread":
        """Summarise one value a repeat."""
        return cls(float(np.median(values)), float(values.min()), float(values.max()))


@dataclass(frozen=True)
class Seconds:
    """Times of one method.

    Args:
        values: seconds, by repeat, phase (`PHASES`) and clock (`CLOCKS`).

    Shape:
        values float64[repeats, 3, 2].
    """

    values: NDArray[np.float64]

    def of(self, phase: str, clock: str = "cpu") -> NDArray[np.float64]:
        """Seconds of every repeat."""
        return self.values[:, PHASES.index(phase), CLOCKS.index(clock)]


def measure_interleaved(
    methods: Mapping[str, Method],
    repeats: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Seconds]:
    """Time all methods `repeats` times, in turn, after one untimed run of each.

    Args:
        methods: by name. Every second repeat runs them in the opposite order.
        repeats: how often.
        progress: called with (runs done, runs in all).
    """
    total, done = len(methods) * (repeats + 1), 0
    values: dict[str, list[list[list[float]]]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name in sorted(methods, reverse=repeat % 2 == 1):
            seconds = _time(methods[name])
            if repeat:
                values[name].append(seconds)
            done += 1
            progress(done, total)
    return {name: Seconds(np.array(runs)) for name, runs in values.items()}


def _time(method: Method) -> list[list[float]]:
    """Seconds by phase and clock."""
    marks = [_clocks()]
    state = method.forward()
    marks.append(_clocks())
    method.backward(state)
    marks.append(_clocks())
    forward, backward = (np.subtract(marks[i + 1], marks[i]) for i in range(2))
    return [list(forward), list(backward), list(forward + backward)]


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    estimate: float
    low: float
    high: float


def bootstrap_ratio(
    numerator: NDArray[np.float64], denominator: NDArray[np.float64], *, seed: int = 0
) -> Interval:
    """Ratio of two means over the same repeats, whose pairs are resampled together.

    Args:
        numerator: one value a repeat.
        denominator: of the same repeats.
        seed: of the resampling.

    Shape:
        float64[repeats] both.
    """
    drawn = np.random.default_rng(seed).integers(numerator.size, size=(_RESAMPLES, numerator.size))
    ratios = numerator[drawn].sum(axis=1) / denominator[drawn].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(numerator.sum() / denominator.sum()), float(low), float(high))
