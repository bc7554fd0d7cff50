"""The store benchmark as tables and a picture."""

import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.store import StoreBenchmark

# Okabe and Ito's palette.
_OURS, _RAW, _GREY = "#0072B2", "#E69F00", "#999999"
_MEGA = 1e6


def print_store(result: StoreBenchmark, console: Console | None = None) -> None:
    """Print what was built, read and held, and how fast.

    Args:
        result: of `bench_store`.
        console: where to; standard output when None.
    """
    console = console or Console()
    shape = result.shape
    console.print(
        f"{shape.documents:,} documents, {result.tokens:,} tokens (the longest {result.longest:,}),"
        f" {result.packs} packs; rows of {2 * shape.width:,} bytes, {result.num_bytes / 1e9:.2f} GB"
        f" in {result.shards} shards\nbuilt in {result.build_seconds:.1f} s (features made up, "
        f"written, synced, hashed), verified in {result.verify_seconds:.1f} s "
        f"({result.num_bytes / result.verify_seconds / 1e9:.2f} GB/s)",
        highlight=False,
    )
    console.print(_rank_table(result))
    console.print(_speed_table(result))
    console.print(
        "Every row was compared with what was written, and the bytes with those of the rank's "
        "rows. Growth: of resident memory, while the batch of the rank's largest pack was read, "
        "and over a whole step of any pack (tokens, masks, anchors and plan too).",
        highlight=False,
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _rank_table(result: StoreBenchmark) -> Table:
    table = _table(
        f"One epoch on P = {result.shape.cp_size} ranks",
        *("rank", "rows", "MB read", "share x P", "own MB", "growth, read", "growth, step"),
    )
    for rank in result.ranks:
        table.add_row(
            str(rank.rank),
            f"{rank.rows:,}",
            f"{rank.bytes_read / _MEGA:,.1f}",
            f"{rank.rows * result.shape.cp_size / result.tokens:.4f}",
            f"{rank.own_bytes / _MEGA:,.1f}",
            *(
                f"{grown / _MEGA:,.1f} = {grown / rank.own_bytes:.2f}x"
                for grown in (rank.read_peak_bytes, rank.step_peak_bytes)
            ),
        )
    return table


def _speed_table(result: StoreBenchmark) -> Table:
    table = _table(
        "Rows a second, medians of epochs that take turns",
        *("files", "seconds are", "epochs", "store", "raw np.memmap", "ratio"),
    )
    for speed in result.speeds:
        table.add_row(
            speed.state,
            "passed" if speed.state == "cold" else "CPU's",
            str(len(speed.store_seconds)),
            f"{speed.rows_per_second(speed.store_seconds):,.0f}",
            f"{speed.rows_per_second(speed.mapping_seconds):,.0f}",
            f"{speed.ratio:.2f}",
        )
    return table


def draw_store(result: StoreBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw lengths, memory a rank and rows a second as a PNG.

    Args:
        result: of `bench_store`.
        path: the PNG file.
    """
    figure = Figure(figsize=(15, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _draw_lengths(left, result)
    _draw_memory(middle, result)
    _draw_speed(right, result)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, format="png")


def _draw_lengths(axes: Axes, result: StoreBenchmark) -> None:
    lengths = result.shape.lengths()
    edges = 2.0 ** np.arange(np.floor(np.log2(lengths.min())), np.log2(lengths.max()) + 1)
    axes.hist(lengths, edges.tolist(), color=_GREY)
    axes.set_xscale("log", base=2)
    axes.set(
        title=f"{result.shape.documents:,} documents, {result.num_bytes / 1e9:.2f} GB",
        xlabel="tokens of a document",
        ylabel="documents",
    )


def _draw_memory(axes: Axes, result: StoreBenchmark) -> None:
    x = np.arange(len(result.ranks))
    for offset, name, label, colour in (
        (-0.25, "own_bytes", "own rows", _GREY),
        (0.0, "read_peak_bytes", "growth, read", _OURS),
        (0.25, "step_peak_bytes", "growth, step", "#56B4E9"),
    ):
        heights = [getattr(rank, name) / _MEGA for rank in result.ranks]
        axes.bar(x + offset, heights, 0.25, color=colour, label=label)
    twice = 2 * max(rank.own_bytes for rank in result.ranks) / _MEGA
    axes.axhline(twice, color="black", linewidth=1, linestyle=":", label="2x own rows")
    axes.set_xticks(x, [str(rank.rank) for rank in result.ranks])
    axes.set(title="Peak memory of a rank", xlabel="rank", ylabel="MB")
    axes.legend(frameon=False, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.77))


def _draw_speed(axes: Axes, result: StoreBenchmark) -> None:
    for place, speed in enumerate(result.speeds):
        for offset, seconds, label, colour in (
            (-0.2, speed.store_seconds, "store", _OURS),
            (0.2, speed.mapping_seconds, "raw np.memmap", _RAW),
        ):
            rows = speed.rows_per_second(seconds) / _MEGA
            axes.bar(place + offset, rows, 0.4, color=colour, label=label if place == 0 else None)
            axes.annotate(f"{rows:.2f}", (place + offset, rows), ha="center", va="bottom")
    axes.set_xticks(range(len(result.speeds)), [speed.state for speed in result.speeds])
    axes.set(title="Reading the ranks' rows", xlabel="files", ylabel="million rows a second")
    axes.legend(frameon=False)
