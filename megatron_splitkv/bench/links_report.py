"""What `bench links` found, as a table and as a picture."""

import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.link_fit import PATTERNS, by_pattern, predicted_seconds
from megatron_splitkv.bench.links import MISFIT, LinksBenchmark

# Okabe and Ito's palette.
_COLOURS = dict(zip(PATTERNS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))


def print_links(result: LinksBenchmark, console: Console | None = None) -> None:
    """Print latencies, bandwidths, their errors, and the machine that they make.

    Args:
        result: of `measure_links`.
        console: where to; standard output when None.
    """
    console = console or Console()
    table = Table(title=f"Links of {result.ranks} ranks, {result.backend}", box=SIMPLE_HEAD)
    for column in ("pattern", "ranks"):
        table.add_column(column)
    for column in ("latency, us", "GB/s sent", "line is off", "model is off"):
        table.add_column(column, justify="right")
    for fit in result.fits:
        speed = f"{fit.bandwidth / 1e9:.3g}" if np.isfinite(fit.bandwidth) else "-"
        table.add_row(
            fit.pattern,
            _where(fit.within, fit.ranks),
            f"{1e6 * fit.latency:.3g}",
            speed,
            f"{fit.error:.1%}",
            f"{result.error(fit):.1%}",
        )
    console.print(table)
    links = result.links
    console.print(
        f"model {links.name!r}, {links.ranks_per_node} ranks a node: inside "
        f"{1e6 * links.intra_latency:.3g} us and {links.intra_bandwidth / 1e9:.3g} GB/s a rank; "
        f"between nodes {1e6 * links.inter_latency:.3g} us, {links.nics_per_node} cards of "
        f"{links.nic_bandwidth / 1e9:.3g} GB/s; a rank reaches {links.dense_flops / 1e12:.3g} "
        f"TFLOP/s in matrix products, {links.attention_flops / 1e12:.3g} in attention",
        highlight=False,
        soft_wrap=True,
    )
    if result.misfits:
        off = ", ".join(
            f"{fit.pattern} among {_where(fit.within, fit.ranks)} by {result.error(fit):.0%}"
            for fit in result.misfits
        )
        console.print(
            f"warning: the model is off by more than {MISFIT:.0%}: {off}; measure again on an idle "
            "machine, or with more --repeats, before 'auto' goes by it",
            highlight=False,
            soft_wrap=True,
        )
    if result.assumed:
        console.print(
            f"not measured, taken from a preset: {', '.join(result.assumed)}",
            highlight=False,
            soft_wrap=True,
        )


def draw_links(result: LinksBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw times over sizes with the model's lines as a PNG.

    Args:
        result: of `measure_links`.
        path: the PNG file.
    """
    scopes = sorted({fit.within for fit in result.fits}, reverse=True)
    figure = Figure(figsize=(5.6 * len(scopes), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for place, within in enumerate(scopes):
        axes = figure.add_subplot(1, len(scopes), place + 1)
        _draw_scope(result, axes, within)
    figure.savefig(path, format="png")


def _draw_scope(result: LinksBenchmark, axes: Axes, within: bool) -> None:
    groups = [group for group in by_pattern(result.samples) if group[0].within == within]
    for group in groups:
        points = sorted(group, key=lambda sample: sample.sent)
        colour, sent = _COLOURS[points[0].pattern], [s.sent for s in points]
        middle = np.array([s.seconds for s in points])
        spread = [middle - [s.low for s in points], [s.high for s in points] - middle]
        axes.errorbar(
            sent, middle, yerr=spread, fmt="o", color=colour, capsize=3, label=points[0].pattern
        )
        axes.plot(sent, [predicted_seconds(s, result.links) for s in points], color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes that a rank sends")
    axes.set_ylabel("seconds: median, range, and model")
    axes.set_title(_where(within, groups[0][0].ranks), fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


def _where(within: bool, ranks: int) -> str:
    return f"{ranks} of a node" if within else f"{ranks} of all nodes"
