"""What `splitkv plan` says: a table for people, an object for programs."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.plan.comparison import Comparison, PlanFigures


class _Column(NamedTuple):
    """A figure: its name in JSON, its unit there, and how the table shows it."""

    name: str
    figure: str
    factor: float
    heading: str
    show: Callable[[float], str]
    with_worst: bool = False
    only_json: bool = False


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _compact(value: float) -> str:
    """Three digits that count and a letter: 671M."""
    for letter in " kMGTP":
        if abs(value) < 999.5:
            return f"{value:.3g}{letter}".rstrip()
        value /= 1000
    return f"{value:.3g}E"


_COLUMNS = (
    _Column("imbalance_percent", "imbalance", 100, "pairs\n%", _digits, with_worst=True),
    _Column("tile_imbalance_percent", "tile_imbalance", 100, "tiles\n%", _digits, with_worst=True),
    _Column("max_work_pairs", "most_work", 1, "most\npairs", _compact),
    _Column("max_context_rows", "most_rows", 1, "most\nrows", "{:.0f}".format),
    _Column("rows_moved_percent", "rows_moved", 100, "moved\n%", _tenths),
    _Column("rows_moved_matched_percent", "rows_moved_matched", 100, "match\n%", _tenths),
    _Column("queries_needed_percent", "queries", 100, "query\n%", _tenths),
    _Column("queries_needed_matched_percent", "queries_matched", 100, "", _tenths, only_json=True),
    _Column("planning_ms", "planning_seconds", 1e3, "plan\nms", _digits),
)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Means over the micro-batches, and the worst under `worst`; None where there is none."""

    def figures(of: Callable[[str, str], float | None], strategy: str) -> dict[str, float | None]:
        values = {column: of(strategy, column.figure) for column in _COLUMNS}
        return {c.name: None if v is None else c.factor * v for c, v in values.items()}

    return {
        "cp_size": comparison.cp_size,
        "chunks_per_rank": comparison.chunks_per_rank,
        "windows": list(comparison.windows),
        "tiles": comparison.tiles,
        "context_lengths": comparison.context_lengths,
        "blocks": comparison.blocks,
        "sources": comparison.sources,
        "strategies": {
            strategy: figures(comparison.mean, strategy)
            | {"worst": figures(comparison.worst, strategy)}
            for strategy in comparison.figures
        },
    }


def print_comparison(comparison: Comparison) -> None:
    """The same as a table."""
    several = len(comparison.blocks) > 1
    rows, blocks = sorted(set(comparison.context_lengths)), sorted(set(comparison.blocks))
    size = next(iter(comparison.plans.values())).block_size
    title = (
        f"{_span(rows)} context rows, {_span(blocks)} blocks of {size}, {comparison.cp_size} ranks"
    )
    if comparison.windows != (None,):
        windows = ", ".join(str(window or "none") for window in comparison.windows)
        title += f"\nwork summed over layers with windows {windows}"
    if comparison.tiles:
        title += "\nchunks cut and priced by kernel tiles"
    if several:
        title += f"\nmeans of {len(comparison.blocks)} micro-batches, the worst in brackets"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("\nstrategy", no_wrap=True)
    shown = [column for column in _COLUMNS if not column.only_json]
    for column in shown:
        table.add_column(column.heading, justify="right", overflow="fold")
    for strategy in comparison.figures:
        cells = [_cell(comparison, strategy, column, several) for column in shown]
        table.add_row(strategy, *cells, style="bold" if strategy == "balanced" else None)
    Console().print(table)
    print(
        "pairs, tiles: how much more than the mean the busiest rank computes\n"
        "moved: share of the rows that change their rank; match: with bundles matched to ranks\n"
        f"       before, the rows were {', '.join(sorted(set(comparison.sources)))}\n"
        "query: most queries that a rank is sent, if each goes only where keys are that it sees"
    )
    if any(f.tile_imbalance is None or f.queries is None for f in _every(comparison)):
        print("-: ranks times blocks are too many to count that through")


def _every(comparison: Comparison) -> Iterator[PlanFigures]:
    return chain.from_iterable(comparison.figures.values())


def _cell(comparison: Comparison, strategy: str, column: _Column, several: bool) -> str:
    mean = comparison.mean(strategy, column.figure)
    worst = comparison.worst(strategy, column.figure)
    if mean is None or worst is None:
        return "-"
    text = column.show(column.factor * mean)
    if several and column.with_worst:
        text += f"\n({column.show(column.factor * worst)})"
    return text


def _span(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
