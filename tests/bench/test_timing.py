"""Methods take turns, phases are told apart, and the first run of each is not counted."""

import numpy as np
import pytest

from megatron_splitkv.bench import timing
from megatron_splitkv.bench.timing import Spread, bootstrap_ratio, measure_interleaved


class Clock:
    """CPU- and wall seconds that pass only when a method says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


class Sleeper:
    def __init__(self, name: str, clock: Clock, log: list[str]) -> None:
        self.name, self.clock, self.log, self.runs = name, clock, log, 0

    def forward(self) -> str:
        self.runs += 1
        self.clock.pass_seconds(1000.0 if self.runs == 1 else 1.0)
        return self.name

    def backward(self, state: str) -> None:
        assert state == self.name
        self.log.append(state)
        self.clock.pass_seconds(2.0 * self.runs)


def test_interleaved_and_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "_clocks", lambda: (clock.now, 10 * clock.now))
    log: list[str] = []
    watched: list[tuple[int, int]] = []
    methods = {name: Sleeper(name, clock, log) for name in ("a", "b")}
    seconds = measure_interleaved(methods, 3, lambda done, total: watched.append((done, total)))
    assert log == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert watched == [(i, 8) for i in range(1, 9)]
    for times in seconds.values():
        assert times.of("forward").tolist() == [1.0] * 3
        assert times.of("backward").tolist() == [4.0, 6.0, 8.0]
        assert times.of("total", "wall").tolist() == [50.0, 70.0, 90.0]


def test_spread() -> None:
    assert Spread.of(np.array([3.0, 1.0, 2.0, 10.0])) == Spread(2.5, 1.0, 10.0)


def test_ratio_of_means_with_an_interval_over_pairs() -> None:
    base = np.array([1.0, 2.0, 4.0, 8.0])
    same = bootstrap_ratio(3 * base, base)
    assert (same.estimate, same.low, same.high) == pytest.approx((3, 3, 3))
    noisy = bootstrap_ratio(np.array([2.0, 2.0, 2.0, 6.0]), np.ones(4))
    assert noisy.estimate == 3
    assert noisy.low == 2
    assert 4 <= noisy.high <= 5
    assert noisy == bootstrap_ratio(np.array([2.0, 2.0, 2.0, 6.0]), np.ones(4))
