"""The planning benchmark as tables and a picture, the paper's numbers beside."""

import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.planning import (
    PAPER_IMBALANCE,
    PAPER_MILLISECONDS,
    PlanningBenchmark,
)
from megatron_splitkv.plan.comparison import HYPERGRAPH_RANKS

# Okabe and Ito's palette, and a mark that tells lines apart without it.
_STYLES = {
    "none": ("#999999", "s"),
    "zigzag": ("#E69F00", "^"),
    "lpt": ("#56B4E9", "o"),
    "balanced": ("#0072B2", "D"),
    "balanced-local": ("#009E73", "v"),
    "hypergraph": ("#CC79A7", "P"),
}


def print_planning(result: PlanningBenchmark, console: Console | None = None) -> None:
    """Print imbalance, planning time and growth.

    Args:
        result: of `bench_planning`.
        console: where to; standard output when None.
    """
    console = console or Console()
    shape = result.shape
    for study in shape.studies:
        console.print(_imbalance_table(result, study))
        console.print(_time_table(result, study))
    console.print(_scaling_table(result))
    last = result.points[-1]
    console.print(
        f"J = {shape.chunks_per_rank} chunks a rank for every strategy but zigzag; "
        f"{shape.seeds} draws of anchors"
        + (
            f", {len(last.imbalance['hypergraph'])} for hypergraph; at P = {last.cp_size} it "
            f"plans {last.milliseconds('hypergraph') / last.milliseconds('balanced'):,.0f}x as "
            "long as balanced, in this run"
            if "hypergraph" in result.strategies
            else "; hypergraph is left out: it needs KaHyPar, "
            f"pip install 'megatron-splitkv[hypergraph]', and at most {HYPERGRAPH_RANKS} ranks"
        )
        + ". The paper's numbers are its authors', of another machine.",
        highlight=False,
        markup=False,
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))


def _study_table(result: PlanningBenchmark, study: str, title: str, *more: str) -> Table:
    table = _table(title)
    ranks, context = result.shape.ranks[0], _tokens(result.shape.contexts[-1])
    table.add_column(f"P = {ranks}" if study == "contexts" else f"{context}, P =", no_wrap=True)
    for point in result.study(study):
        heading = _tokens(point.context) if study == "contexts" else str(point.cp_size)
        table.add_column(heading, justify="right")
    for heading in more:
        table.add_column(heading, justify="right", style="dim" if "paper" in heading else None)
    return table


def _imbalance_table(result: PlanningBenchmark, study: str) -> Table:
    title = f"Imbalance over {study}, %: means of the draws"
    table = _study_table(result, study, title, "mean", "std", "worst", "paper")
    number = list(result.shape.studies).index(study)
    for strategy in result.strategies:
        draws = [100 * point.imbalance[strategy] for point in result.study(study)]
        pooled = np.concatenate(draws)
        summary = (result.study_mean(study, strategy), pooled.std(), pooled.max())
        paper = PAPER_IMBALANCE.get(strategy)
        table.add_row(
            strategy,
            *(_digits(percent.mean()) for percent in draws),
            *map(_digits, summary),
            "" if paper is None else f"{paper[number]:.2f}",
            style=_row_style(strategy),
        )
    return table


def _time_table(result: PlanningBenchmark, study: str) -> Table:
    title = f"Planning over {study}, ms: medians, pricing included"
    table = _study_table(result, study, title, "paper")
    number = list(result.shape.studies).index(study)
    for strategy in result.strategies:
        paper = PAPER_MILLISECONDS.get(strategy)
        table.add_row(
            strategy,
            *(_digits(point.milliseconds(strategy)) for point in result.study(study)),
            "" if paper is None else "{} to {}".format(*paper[number]),
            style=_row_style(strategy),
        )
    return table


def _row_style(strategy: str) -> str | None:
    return "bold" if strategy == "balanced" else None


def _digits(value: float) -> str:
    """At most five characters below 1000."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _scaling_table(result: PlanningBenchmark) -> Table:
    table = _table("Growth of balanced, J by rule")
    for heading in ("P", "context rows", "blocks N", "chunks PJ", "ms", "ns/((N+PJ) log2(N+PJ))"):
        table.add_column(heading, justify="right")
    for point in result.scaling:
        table.add_row(
            f"{point.cp_size}",
            f"{point.context_length:,}",
            f"{point.blocks:,}",
            f"{point.chunks:,}",
            f"{point.milliseconds:.2f}",
            f"{point.nanoseconds_per_step:.1f}",
        )
    return table


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def draw_planning(result: PlanningBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw imbalance and planning time over both studies, and their growth, as a PNG.

    Args:
        result: of `bench_planning`.
        path: the PNG file.
    """
    figure = Figure(figsize=(15, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3)
    labels = {
        "contexts": f"tokens a sample, on {result.shape.ranks[0]} ranks",
        "ranks": f"ranks, {_tokens(result.shape.contexts[-1])} tokens a sample",
    }
    for column, study in enumerate(result.shape.studies):
        _draw_imbalance(grid[0, column], result, study, column)
        _draw_time(grid[1, column], result, study, column)
        for axes in grid[:, column]:
            axes.set_xlabel(labels[study])
    _draw_growth(grid[0, 2], grid[1, 2], result)
    for axes in grid.ravel():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, format="png")


def _x_axis(axes: Axes, values: list[int], names: list[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, names)
    axes.xaxis.set_minor_locator(NullLocator())


def _study_x(axes: Axes, result: PlanningBenchmark, study: str) -> list[int]:
    points = result.study(study)
    x = [point.context if study == "contexts" else point.cp_size for point in points]
    _x_axis(axes, x, [_tokens(v) if study == "contexts" else str(v) for v in x])
    return x


def _draw_imbalance(axes: Axes, result: PlanningBenchmark, study: str, column: int) -> None:
    x = _study_x(axes, result, study)
    for strategy in result.strategies:
        colour, mark = _STYLES[strategy]
        percent = [100 * point.imbalance[strategy] for point in result.study(study)]
        mean = np.array([p.mean() for p in percent])
        spread = [mean - [p.min() for p in percent], [p.max() for p in percent] - mean]
        axes.errorbar(
            x, mean, yerr=spread, color=colour, marker=mark, markersize=5, capsize=3, label=strategy
        )
        if strategy in PAPER_IMBALANCE:
            axes.axhline(
                PAPER_IMBALANCE[strategy][column],
                color=colour,
                linestyle=":",
                linewidth=1.3,
                label="the paper's means" if strategy == "none" else None,
            )
    axes.set_yscale("log")
    axes.set_title("imbalance, %: mean and range", loc="left")


def _draw_time(axes: Axes, result: PlanningBenchmark, study: str, column: int) -> None:
    x = _study_x(axes, result, study)
    for strategy in result.strategies:
        colour, mark = _STYLES[strategy]
        milliseconds = [point.milliseconds(strategy) for point in result.study(study)]
        axes.plot(x, milliseconds, color=colour, marker=mark, markersize=5)
        if strategy in PAPER_MILLISECONDS:
            low, high = PAPER_MILLISECONDS[strategy][column]
            axes.axhspan(low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_title("planning, ms; bands: the paper's, on its machine", loc="left")


def _draw_growth(time: Axes, normalised: Axes, result: PlanningBenchmark) -> None:
    colour, mark = _STYLES["balanced"]
    ranks = [point.cp_size for point in result.scaling]
    time.loglog(ranks, [p.milliseconds for p in result.scaling], color=colour, marker=mark)
    time.set_title("balanced, planning, ms", loc="left")
    steps = [p.nanoseconds_per_step for p in result.scaling]
    normalised.plot(ranks, steps, color=colour, marker=mark)
    normalised.set_ylim(0, 1.2 * max(steps))
    normalised.set_title("balanced, ns / ((N + PJ) log2(N + PJ))", loc="left")
    for axes in (time, normalised):
        _x_axis(axes, ranks, [str(rank) for rank in ranks])
        axes.set_xlabel("ranks, 64k rows each, J by rule")
