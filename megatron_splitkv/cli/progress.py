"""Progress bars of commands that work in stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Torch is imported when a command runs, not when its --help is shown.
if TYPE_CHECKING:
    from megatron_splitkv.data.prepare import Stages
    from megatron_splitkv.data.target import Progress as StageProgress


@contextmanager
def stage_bars(*, quiet: bool = False) -> "Iterator[Stages]":
    """Stages that show themselves as one progress bar each, on standard error.

    Args:
        quiet: show nothing.
    """
    from megatron_splitkv.data.prepare import Stages

    with _bars(quiet) as bars:
        yield Stages(lambda name: _watch(bars, name))


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
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )


def _watch(bars: Progress, name: str) -> "StageProgress":
    task = bars.add_task(name, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
