"""Units are shared by number alone, and what a dead process leaves is done by the leader."""

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.work import Patience, SharedProgress, Worker, run_units


class Clock:
    """Seconds that pass only when somebody sleeps; `events` happen on the way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int]] = []
        self.done: list[int] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.done.append(self.events.pop(0)[1])

    def patience(self, limit: float) -> Patience:
        return Patience(limit, self, self.sleep)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_unit_has_one_owner(world_size: int) -> None:
    workers = [Worker(rank, world_size) for rank in range(world_size)]
    assert [sum(w.owns(unit) for w in workers) for unit in range(10)] == [1] * 10
    assert [w.leads for w in workers] == [True] + [False] * (world_size - 1)


def test_torchrun_numbers_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Worker.from_environment() == Worker(0, 1, 0)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Worker.from_environment() == Worker(9, 16, 1)
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="RANK 9 does not fit WORLD_SIZE 9"):
        Worker.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many' is no number"):
        Worker.from_environment()


def test_a_follower_does_its_own_missing_units_and_returns() -> None:
    done = [1, 2]
    run_units(Worker(1, 2), 7, done.__contains__, done.append)
    assert done == [1, 2, 3, 5]


def test_the_leader_waits_for_the_others() -> None:
    clock = Clock()
    clock.events = [(5.0, 1), (14.0, 3)]
    mine: list[int] = []

    def do(unit: int) -> None:
        mine.append(unit)
        clock.done.append(unit)

    run_units(Worker(0, 2), 4, clock.done.__contains__, do, lambda: clock.patience(10.0))
    assert mine == [0, 2]
    assert 14.0 <= clock.now < 15.0


def test_the_leader_does_what_a_dead_process_left() -> None:
    clock = Clock()
    clock.events = [(5.0, 1)]
    mine: list[int] = []

    def do(unit: int) -> None:
        mine.append(unit)
        clock.done.append(unit)

    run_units(Worker(0, 2), 6, clock.done.__contains__, do, lambda: clock.patience(10.0))
    assert mine == [0, 2, 4, 5, 3]
    # Silence is counted from the last sign of life, and again after each unit that it takes over.
    assert 25.0 <= clock.now < 27.0


def test_a_unit_that_another_process_has_done_meanwhile_is_no_failure() -> None:
    done: list[int] = []

    def do(unit: int) -> None:
        if unit == 1:
            done.append(unit)
        raise ConfigError(f"unit {unit} is in the way")

    run_units(Worker(1, 2), 2, done.__contains__, do)
    with pytest.raises(ConfigError, match="unit 3 is in the way"):
        run_units(Worker(1, 2), 4, done.__contains__, do)


def test_progress_counts_the_units_of_all() -> None:
    clock, told, done = Clock(), list[tuple[int, int]](), [1]
    shared = SharedProgress([10, 20, 30], done.__contains__, lambda *pair: told.append(pair), clock)
    assert shared.units_finished == 1
    assert told == [(20, 60)]
    shared.inside(4)
    assert told[-1] == (24, 60)
    done.append(2)
    shared.inside(6)  # Others are looked for now and then, not at every step.
    assert told[-1] == (26, 60)
    clock.now = 6.0
    shared.inside(7)
    assert told[-1] == (57, 60)
    done.append(0)
    assert shared.finished(0)
    assert told[-1] == (60, 60)
    done.clear()
    assert shared.finished(0)
    assert shared.units_finished == 3
