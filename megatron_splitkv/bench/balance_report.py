"""The balance benchmark as tables and a picture."""

import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.balance import BASELINE, BalanceBenchmark, BalanceRun
from megatron_splitkv.bench.balance_step import PHASES
from megatron_splitkv.bench.timing import Interval

_FORWARD, _BACKWARD, _WAITING, _PLAN = "#56B4E9", "#0072B2", "#D55E00", "#333333"


def print_balance(result: BalanceBenchmark, console: Console | None = None) -> None:
    """Print a table for every number of ranks.

    Args:
        result: of `bench_balance`.
        console: where to; standard output when None.
    """
    console = console or Console()
    shape = result.shape
    console.print(
        f"{shape.samples} x {shape.context:,} context rows, {shape.anchors} blocks of "
        f"{shape.block_size} a sample, {shape.layers} layer(s) {shape.hidden_size} wide, "
        f"{shape.repeats} steps of each strategy",
        highlight=False,
    )
    for cp_size, runs in result.runs.items():
        table = Table(
            title=f"{cp_size} ranks", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1)
        )
        table.add_column("\n\nstrategy", no_wrap=True)
        for heading in (
            "work\nimbalance\n%",
            "\nstep\nms",
            "\nplan\nms",
            "speed-up,\nplanned\nahead",
            "speed-up,\nplanned\nin the step",
            "the work\nalone\nsays",
            "\nwall\nms",
        ):
            table.add_column(heading, justify="right")
        for name, run in runs.items():
            table.add_row(
                name,
                f"{100 * run.imbalance.mean():.2f}",
                f"{1e3 * run.step_seconds('ahead').mean():.0f}",
                f"{1e3 * _planning(run):.1f}",
                "1" if name == BASELINE else _interval(result.speedup(cp_size, name, "ahead")),
                _interval(result.speedup(cp_size, name, "inside")),
                f"{result.predicted(cp_size, name):.2f}",
                f"{1e3 * run.wall.mean():.0f}",
                style="bold" if name == "balanced" else None,
            )
        console.print(table)
    console.print(
        "step: CPU time of the slowest rank in forward and in backward, what a machine with a core "
        f"for each rank would take; speed-up: over {BASELINE}, with 95 % intervals over the steps; "
        "wall: of this machine, planning included",
        highlight=False,
    )


def _planning(run: BalanceRun) -> float:
    return float((run.step_seconds("inside") - run.step_seconds("ahead")).mean())


def _interval(ratio: Interval) -> str:
    return f"{ratio.estimate:.2f}\n[{ratio.low:.2f}, {ratio.high:.2f}]"


def draw_balance(result: BalanceBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw the ranks' seconds under every strategy, and what they wait for, as a PNG.

    Args:
        result: of `bench_balance`.
        path: the PNG file.
    """
    figure = Figure(figsize=(6.5 * len(result.runs), 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(result.runs), squeeze=False)[0]
    for axes, cp_size in zip(panels, result.runs, strict=True):
        _draw_ranks(axes, result, cp_size)
    figure.legend(
        handles=[
            Patch(facecolor=_FORWARD, label="forward"),
            Patch(facecolor=_BACKWARD, label="backward"),
            Patch(facecolor="#fbe3d6", edgecolor=_WAITING, hatch="////", linewidth=0, label="wait"),
            Patch(facecolor=_PLAN, label="planning, if it is not done ahead"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, format="png")


def _draw_ranks(axes: Axes, result: BalanceBenchmark, cp_size: int) -> None:
    runs = result.runs[cp_size]
    width = 0.8 / cp_size
    for i, (name, run) in enumerate(runs.items()):
        x = i - 0.4 + width * (np.arange(cp_size) + 0.5)
        forward, backward = (
            run.seconds[:, :, PHASES.index(phase)].mean(axis=0) for phase in PHASES[1:]
        )
        step, plan = float(run.step_seconds("ahead").mean()), _planning(run)
        busy = forward + backward
        axes.bar(x, forward, width, color=_FORWARD)
        axes.bar(x, backward, width, bottom=forward, color=_BACKWARD)
        axes.bar(
            x,
            step - busy,
            width,
            bottom=busy,
            facecolor="#fbe3d6",
            edgecolor=_WAITING,
            hatch="////",
            linewidth=0,
        )
        axes.bar(i, plan, 0.8, bottom=step, color=_PLAN)
        if name != BASELINE:
            ratio = result.speedup(cp_size, name, "ahead")
            axes.annotate(
                f"{ratio.estimate:.2f}x\n[{ratio.low:.2f}, {ratio.high:.2f}]\n"
                f"work: {result.predicted(cp_size, name):.2f}x",
                (i, step + plan),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                fontweight="bold" if name == "balanced" else "normal",
            )
    axes.set_xticks(range(len(runs)), list(runs))
    axes.set_ylim(0, 1.3 * max(float(r.step_seconds("inside").mean()) for r in runs.values()))
    axes.set_ylabel("CPU-seconds of each rank in a step")
    axes.set_title(f"{cp_size} ranks: speed-up over {BASELINE}, planned ahead", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
