"""`splitkv bench step` as tables and a picture."""

import os
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.step import StepBenchmark, StepPoint
from megatron_splitkv.bench.step_shape import PAPER_PLACES, Method
from megatron_splitkv.bench.step_time import PARTS
from megatron_splitkv.bench.timing import Spread

# Okabe and Ito's palette.
_PART_COLOURS = dict(zip(PARTS, ("#0072B2", "#999999", "#E69F00"), strict=True))
_PART_LABELS = {
    "compute": "computation, mean of the ranks",
    "stragglers": "waiting for slower ranks",
    "communication": "waiting for links",
}
_COLOURS = {
    "splitkv": "#0072B2",
    "a2a": "#D55E00",
    "p2p": "#CC79A7",
    "ringx": "#009E73",
    "lv_xattn": "#E69F00",
    "all_gather": "#56B4E9",
}
_NAMES = {
    "splitkv": "Split-KV",
    "a2a": "a2a (Ulysses)",
    "p2p": "p2p (ring)",
    "ringx": "ringx (RingX)",
    "lv_xattn": "lv_xattn (LV-XAttn)",
    "all_gather": "all_gather (K/V)",
}


def print_steps(result: StepBenchmark, console: Console | None = None) -> None:
    """Print two tables for each point, and the growth from the first context to the last.

    Args:
        result: of `bench_step`.
        console: where to; standard output when None.
    """
    console = console or Console()
    for point in result.points:
        console.print(_traffic_table(point))
        console.print(_time_table(point))
        for line in _notes(point):
            console.print(line, highlight=False)
    for series in _by_context(result):
        console.print(_growth(series), highlight=False)


def _traffic_table(point: StepPoint) -> Table:
    """What moves and what lies in memory; 80 columns, as the other table."""
    table = Table(title=_title(point), box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    table.add_column("rows", no_wrap=True)
    for column in ("MiB", "calls", "peak", "imb. %"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, run in point.runs.items():
        table.add_row(
            name,
            _rows(run.method),
            f"{np.mean(run.bytes) / 2**20:.2f}{'' if run.as_formula else ' (!)'}",
            str(run.calls),
            f"{max(run.peak_bytes) / 2**20:.1f}",
            f"{100 * run.imbalance:.1f}",
            style="bold" if run is point.ours else None,
        )
    return table


def _time_table(point: StepPoint) -> Table:
    table = Table(
        title="attention + communication, forward and backward: medians (range)", box=SIMPLE_HEAD
    )
    table.add_column("method", no_wrap=True)
    for column in ("ms", "x Split-KV", "CPU s", "layer"):
        table.add_column(column, justify="right", no_wrap=True)
    unit = _unit(point)
    for name, run in point.runs.items():
        ratio = Spread.of(run.seconds() / point.ours.seconds())
        cpu = run.cpu_seconds.mean(axis=0)
        table.add_row(
            name,
            _number(float(np.median(run.seconds())) * unit),
            "1"
            if run is point.ours
            else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            f"{cpu.mean():.2f} / {cpu.max():.2f}",
            _number(float(np.median(run.seconds(whole=True))) * unit),
            style="bold" if run is point.ours else None,
        )
    return table


def _notes(point: StepPoint) -> list[str]:
    runs = list(point.runs.values())
    wrong = [name for name, run in point.runs.items() if not run.as_formula]
    notes = [
        "MiB, calls and peak MiB of a rank, sent and called "
        + (f"NOT by the formula for {', '.join(wrong)}" if wrong else "equal to the formulas")
        + "; mirrored: draft blocks; CPU s: mean and busiest rank; layer: ms of a whole one"
        + "; largest difference of outputs to Split-KV's: "
        + f"{max(run.difference for run in runs):.1e}"
    ]
    if point.injection is not None:
        links, injection = point.injection.links, point.injection
        notes.append(
            f"times: of the whole drafter's layer on {links.name}, {links.ranks_per_node} ranks a "
            f"node ({links.intra_bandwidth / 1e9:g} GB/s inside, {links.inter_bandwidth / 1e9:g} "
            f"GB/s a rank between), if kernels reach {links.attention_flops / 1e12:g} TFLOP/s; "
            f"this core's reach {injection.core_flops / 1e9:.1f} GFLOP/s and computed, links were "
            f"injected: a second there is {injection.slowdown:.0f} here"
        )
    peers = [run for run in runs if run.method.strategy != "splitkv"]
    ours = point.ours
    faster = [r.method.name for r in peers if np.median(r.seconds() / ours.seconds()) < 1]
    fewer = [r.method.name for r in peers if np.mean(r.bytes) < np.mean(ours.bytes)]
    notes.append(
        f"faster than Split-KV: {', '.join(faster) or 'none'}; with fewer bytes: "
        f"{', '.join(fewer) or 'none'}"
    )
    over, layer = point.auto_over_best(), point.auto_over_best(whole=True)
    notes.append(
        f"auto would choose {point.auto.method.name}: {over.median:.2f}x ({over.low:.2f} to "
        f"{over.high:.2f}) the time of the best method that a launch offers, "
        f"{point.fastest_offered.method.name}; {layer.median:.2f}x in a whole layer"
    )
    return notes


def _growth(series: list[StepPoint]) -> str:
    """How attention's communication and time grow with the context."""
    first, last = series[0], series[-1]
    parts = []
    for name, run in last.runs.items():
        before = first.runs.get(name)
        if before is not None:
            sent = np.mean(run.bytes) / np.mean(before.bytes)
            seconds = np.median(run.seconds()) * _unit(last)
            seconds /= np.median(before.seconds()) * _unit(first)
            parts.append(f"{name} {sent:.2f}x, {seconds:.2f}x")
    return (
        f"from {first.shape.context:,} to {last.shape.context:,} context rows, {first.cp_size} "
        f"ranks: bytes and time grow: {'; '.join(parts)}"
    )


def draw_steps(result: StepBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw the last point's times by parts, and bytes and times over contexts, as a PNG.

    Args:
        result: of `bench_step`.
        path: the PNG file.
    """
    all_series = _by_context(result)
    width = [2.2, 1, 1] if all_series else [1]
    figure = Figure(figsize=(15.5 if all_series else 9, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(width), width_ratios=width, squeeze=False)[0]
    point = result.points[-1]
    _draw_parts(axes[0], point)
    if all_series:
        series = all_series[-1]
        _draw_lines(
            axes[1], series, "MiB that a rank sends", lambda run, _: np.mean(run.bytes) / 2**20
        )
        _draw_lines(
            axes[2],
            series,
            "attention + communication, ms",
            lambda run, at: np.median(run.seconds()) * _unit(at),
        )
        figure.legend(
            *axes[1].get_legend_handles_labels(),
            loc="outside lower right",
            ncols=7,
            frameon=False,
            fontsize=9,
        )
    figure.suptitle(_title(point).replace("\n", "; "), fontsize=12, x=0.01, ha="left")
    figure.savefig(path, format="png")


def _draw_parts(axes: Axes, point: StepPoint) -> None:
    runs = list(point.runs.values())
    unit = _unit(point)
    parts = PARTS if point.injection else PARTS[:1]
    for row, run in enumerate(runs):
        left = 0.0
        medians = np.median(run.attention, axis=0) * unit
        for part, value in zip(parts, medians, strict=False):
            label = _PART_LABELS[part] if row == 0 and point.injection else None
            axes.barh(row, value, left=left, height=0.66, color=_PART_COLOURS[part], label=label)
            left += value
        times = Spread.of(run.seconds() * unit)
        error = [[max(0.0, left - times.low)], [max(0.0, times.high - left)]]
        axes.errorbar(left, row, xerr=error, fmt="none", ecolor="black", capsize=3)
        ratio = float(np.median(run.seconds() / point.ours.seconds()))
        axes.annotate(
            f"{_number(times.median)} ms" + ("" if run is point.ours else f", {ratio:.2f}x"),
            (max(left, times.high), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if run is point.ours else "normal",
        )
    axes.set_yticks(
        range(len(runs)),
        [f"{_name(r.method, point)}\n{_placement(r.method)}" for r in runs],
        fontsize=9,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(float((run.seconds() * unit).max()) for run in runs))
    axes.set_xlabel("attention + communication, forward and backward, ms")
    if point.injection:
        axes.legend(frameon=False, loc="upper right", fontsize=9)
    _plain(axes, "x")


def _draw_lines(axes: Axes, series: list[StepPoint], label: str, value: Any) -> None:
    for name, last in series[-1].runs.items():
        if last.method.plan == "balanced" and last.method.strategy != "splitkv":
            continue  # same bytes as the published placement
        at = [point for point in series if name in point.runs]
        ours = last is series[-1].ours
        axes.plot(
            [point.shape.context / 1024 for point in at],
            [value(point.runs[name], point) for point in at],
            color=_COLOURS[last.method.strategy],
            marker="o",
            markersize=4,
            linewidth=2.6 if ours else 1.4,
            linestyle="--" if last.method == PAPER_PLACES and not ours else "-",
            label=_name(last.method, series[-1]),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [point.shape.context / 1024 for point in series]
    axes.set_xticks(ticks, [f"{tick:g}k" for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set_xlabel("context rows")
    axes.set_title(label, fontsize=10, loc="left")
    _plain(axes, "both")


def _plain(axes: Axes, grid: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _by_context(result: StepBenchmark) -> list[list[StepPoint]]:
    """Points that differ in their context alone, ascending; series of one are none."""
    series: dict[tuple[int, int], list[StepPoint]] = {}
    for point in result.points:
        series.setdefault((point.cp_size, point.shape.queries), []).append(point)
    return [
        sorted(points, key=lambda point: point.shape.context)
        for points in series.values()
        if len(points) > 1
    ]


def _unit(point: StepPoint) -> float:
    """From seconds of the run to the milliseconds that are shown."""
    return 1e3 if point.injection is None else 1e3 / point.injection.slowdown


def _title(point: StepPoint) -> str:
    shape, dflash = point.shape, point.shape.dflash
    smaller = "" if shape.shrink == 1 else f", 1/{shape.shrink**2} of its width"
    return (
        f"Attention layer of the {shape.drafter} drafter{smaller}: {dflash.num_attention_heads} / "
        f"{dflash.num_key_value_heads} heads of {dflash.head_dim}, {shape.dtype}\n"
        f"{shape.queries:,} queries, {shape.context:,} context rows on {point.cp_size} ranks"
    )


def _name(method: Method, point: StepPoint) -> str:
    name = _NAMES[method.strategy]
    if method.strategy == "splitkv":
        return f"{name}, {'best place' if method == point.ours.method else 'paper'}"
    return f"{name}, our plan" if method.plan == "balanced" else name


def _placement(method: Method) -> str:
    rows = _rows(method)
    return f"{rows}; {method.gather} + {method.scatter}" if method.strategy == "splitkv" else rows


def _rows(method: Method) -> str:
    """Where context rows are, and draft blocks if not in their order."""
    plan = {"none": "contiguous"}.get(method.plan, method.plan)
    return f"{plan}, mirrored" if method.block_order == "mirrored" else plan


def _number(milliseconds: float) -> str:
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0
    return f"{milliseconds:.{digits}f}"
