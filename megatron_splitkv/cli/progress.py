"""Progress bars of commands that work in stages."""

from collections.abc import Iterator
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

# Torch is imported when a command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.stages import Stages
    from megatron_splitkv.data.target import Progress as StageProgress


@contextmanager
def stage_bars(*, quiet: bool = False) -> "Iterator[Stages]":
    """Stages that show themselves as one progress bar each, on standard error.

    Args:
        quiet: show nothing.
    """
    from megatron_splitkv.data.stages import Stages

    with _bars(quiet) as bars:
        # Above the bars, which stay whole.
        yield Stages(lambda name: _watch(bars, name), lambda line: bars.print(line, markup=False))


@contextmanager
def progress_bar(name: str, *, quiet: bool = False) -> "Iterator[StageProgress]":
    """One progress bar, for commands that do without torch.

    Args:
        name: of what is done.
        quiet: show nothing.
    """
    with _bars(quiet) as bars:
        yield _watch(bars, name)


def _bars(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
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
