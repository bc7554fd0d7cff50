"""Progress where nothing can be drawn: lines of a log, with a clock that the tests turn."""

import threading
from collections.abc import Callable

import pytest

from megatron_splitkv.cli.progress import progress_bar, stage_bars
from megatron_splitkv.cli.progress_lines import EVERY_SECONDS, ProgressLines, progress_lines


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def lines(said: list[str], clock: Clock) -> ProgressLines:
    return ProgressLines(said.append, clock)


def test_a_stage_begins_goes_on_and_ends(
    lines: ProgressLines, said: list[str], clock: Clock
) -> None:
    progress = lines.watch("features")
    progress(0, 6000)
    clock.now += 30
    progress(1500, 6000)
    assert said == ["features: begins"]
    lines.beat()
    clock.now += 60
    progress(6000, 6000)
    progress(6000, 6000)
    lines.beat()
    assert said == [
        "features: begins",
        "features: 1,500/6,000 after 0:00:30, 50/s, about 0:01:30 left",
        "features: 6,000/6,000 done in 0:01:30",
    ]


def test_what_was_there_before_counts_for_no_rate(
    lines: ProgressLines, said: list[str], clock: Clock
) -> None:
    progress = lines.watch("answers")
    clock.now += 5
    progress(90, 100)
    clock.now += 60
    progress(93, 100)
    lines.beat()
    assert said[1:] == ["answers: 93/100 after 0:01:05, 3.0/min, about 0:02:20 left"]


def test_a_stage_that_reports_nothing_is_still_heard_of(
    lines: ProgressLines, said: list[str], clock: Clock
) -> None:
    progress = lines.watch("load target")
    clock.now += 30
    lines.beat()
    progress(0, 4)
    clock.now += 30
    lines.beat()
    progress(1, 4)
    clock.now += 30
    lines.beat()
    clock.now += 30
    lines.beat()
    assert said[1:] == [
        "load target: at work for 0:00:30",
        "load target: 0/4 after 0:01:00",
        "load target: 1/4 after 0:01:30, 1.0/min, about 0:03:00 left",
        "load target: 1/4 after 0:02:00, 0.7/min, about 0:04:30 left",
    ]


def test_of_several_stages_those_are_told_that_moved(
    lines: ProgressLines, said: list[str], clock: Clock
) -> None:
    """As the stages of an evaluation take turns."""
    greedy, controls = lines.watch("greedy"), lines.watch("controls")
    greedy(0, 8)
    controls(0, 24)
    clock.now += 30
    greedy(4, 8)
    lines.beat()
    clock.now += 30
    controls(6, 24)
    lines.beat()
    clock.now += 30
    lines.beat()  # nothing moved: the latest one
    told = [line.split(" after")[0] for line in said[2:]]
    assert told == ["greedy: 4/8", "controls: 6/24", "controls: 6/24"]


def test_lines_come_every_half_minute_until_the_body_ends(said: list[str], clock: Clock) -> None:
    reports: list[Callable[[int, int], None]] = []
    begun, slept = threading.Event(), []

    def wait(seconds: float) -> bool:
        assert begun.wait(60)
        slept.append(seconds)
        clock.now += seconds
        reports[0](len(slept), 3)
        return len(slept) == 3

    with progress_lines(said.append, clock=clock, wait=wait) as lines:
        reports.append(lines.watch("steps"))
        begun.set()
    assert slept == [EVERY_SECONDS] * 3 == [30.0] * 3
    assert said == [
        "steps: begins",
        "steps: 1/3 after 0:00:30",
        "steps: 2/3 after 0:01:00, 2.0/min, about 0:00:30 left",
        "steps: 3/3 done in 0:01:30",
    ]


def test_commands_write_lines_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with stage_bars() as stages:
        stages.say("4 units are there")
        with stages.stage("features") as progress:
            progress(4, 9)
            progress(9, 9)
    with progress_bar("plans") as progress:
        progress(2, 2)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "4 units are there",
        "features: begins",
        "features: 9/9 done in 0:00:00",
        "plans: begins",
        "plans: 2/2 done in 0:00:00",
    ]


def test_a_terminal_has_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with stage_bars() as stages, stages.stage("features") as progress:
        progress(9, 9)
    shown = capsys.readouterr().err
    assert "\x1b[" in shown
    assert "━" in shown
    assert "begins" not in shown


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_bars(quiet=True) as stages, stages.stage("features") as progress:
        stages.say("4 units are there")
        progress(1, 1)
    assert stages.seconds.keys() == {"features"}
    with progress_bar("plans", quiet=True) as progress:
        progress(1, 1)
    assert capsys.readouterr() == ("", "")
