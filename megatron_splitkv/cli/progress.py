"""Progress of commands that work in stages: bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megatron_splitkv.cli.progress_lines import progress_lines

# Torch is imported when a command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.stages import Stages
    from megatron_splitkv.data.target import Progress as StageProgress


@contextmanager
def stage_bars(*, quiet: bool = False) -> "Iterator[Stages]":
    """Stages that show themselves on standard error, as one progress bar each or in lines.

    Args:
        quiet: show nothing.
    """
    from megatron_splitkv.data.stages import Stages

    if quiet:
        yield Stages()
        return
    with _shown() as (watch, say):
        yield Stages(watch, say)


@contextmanager
def progress_bar(name: str, *, quiet: bool = False) -> "Iterator[StageProgress]":
    """One bar, or its lines, for commands that do without torch.

    Args:
        name: of what is done.
        quiet: show nothing.
    """
    if quiet:
        yield lambda done, total: None
        return
    with _shown() as (watch, _):
        yield watch(name)


@contextmanager
def _shown() -> "Iterator[tuple[Callable[[str], StageProgress], Callable[[str], None]]]":
    """What shows a stage, and what shows a line for people beside it."""
    console = Console(stderr=True)
    if not console.is_interactive:
        with progress_lines(_print_line) as lines:
            yield lines.watch, _print_line
        return
    with _bars(console) as bars:
        # Above the bars, which stay whole.
        yield lambda name: _watch(bars, name), lambda line: bars.print(line, markup=False)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        # Items of a minute each, too, shall have a rate.
        speed_estimate_period=600,
    )


class _RateColumn(ProgressColumn):
    """Items a second. What was there at the first report does not count."""

    def render(self, task: Task) -> Text:
        """Draw the column."""
        speed = task.finished_speed or task.speed
        if not speed or speed < 1:
            return Text("")
        return Text(f"{speed:,.0f}/s", style="progress.data.speed")


def _watch(bars: Progress, name: str) -> "StageProgress":
    task = bars.add_task(name, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
