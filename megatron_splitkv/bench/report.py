"""A benchmark as a table, a picture and a JSON file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.attention import IDEAL, MASKED, OURS, UNMASKED, AttentionBenchmark
from megatron_splitkv.bench.timing import PHASES, Spread

_LABELS = {
    MASKED: "SDPA, dense mask",
    UNMASKED: "SDPA, no mask",
    OURS: "our cpu kernel",
    IDEAL: "ideal",
}
# Okabe and Ito's palette.
_COLOURS = {"forward": "#56B4E9", "backward": "#0072B2"}


def print_benchmark(result: AttentionBenchmark, console: Console | None = None) -> None:
    """Print times and ratios.

    Args:
        result: of `bench_attention`.
        console: where to; standard output when None.
    """
    console = console or Console()
    shape = result.shape
    table = Table(
        title=f"{shape.queries:,} queries x {shape.context:,} keys, {shape.heads} / "
        f"{shape.kv_heads} heads of {shape.head_dim}\n{shape.dtype}, density "
        f"{result.density:.3f}, threads: {result.threads}",
        box=SIMPLE_HEAD,
    )
    table.add_column("CPU ms, medians")
    for column in ("forward", "backward", "both", "range", "both, wall"):
        table.add_column(column, justify="right")
    for method in _LABELS:
        total = Spread.of(result.values(method, "total"))
        table.add_row(
            _LABELS[method],
            *(f"{1e3 * np.median(result.values(method, phase)):.1f}" for phase in PHASES),
            f"{1e3 * total.low:.0f} to {1e3 * total.high:.0f}",
            f"{1e3 * np.median(result.values(method, 'total', 'wall')):.1f}",
            style="bold" if method == OURS else None,
        )
    console.print(table)
    for base in (MASKED, IDEAL):
        ratios = {phase: result.ratio(OURS, base, phase) for phase in PHASES}
        console.print(
            f"ours / {_LABELS[base]}: "
            + ", ".join(
                f"{phase} {r.median:.3f}x ({r.low:.3f} to {r.high:.3f})"
                for phase, r in ratios.items()
            ),
            highlight=False,
        )
    console.print(
        f"pairs executed / needed: {result.executed_pairs / result.needed_pairs:.4f}; planned in "
        f"{result.plan_ms:.2f} ms; mask saved: {result.mask_bytes / 2**20:.0f} MiB; largest "
        f"relative difference to the dense mask: {result.difference:.1e}",
        highlight=False,
    )


def draw_benchmark(result: AttentionBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw the CPU-seconds of every method as a PNG.

    Args:
        result: of `bench_attention`.
        path: the PNG file.
    """
    figure = Figure(figsize=(8.6, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    masked = Spread.of(result.values(MASKED, "total")).median
    for row, method in enumerate(_LABELS):
        left = 0.0
        for phase, colour in _COLOURS.items():
            seconds = Spread.of(result.values(method, phase)).median
            label = phase if row == 0 else None
            axes.barh(row, seconds, left=left, height=0.62, color=colour, label=label)
            left += seconds
        total = Spread.of(result.values(method, "total"))
        spread = [[max(0.0, left - total.low)], [max(0.0, total.high - left)]]
        axes.errorbar(left, row, xerr=spread, fmt="none", ecolor="black", capsize=4)
        axes.annotate(
            f"{total.median:.3f} s, {total.median / masked:.2f}x",
            (max(left, total.high), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if method == OURS else "normal",
        )
    axes.set_yticks(range(len(_LABELS)), list(_LABELS.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(result.values(m, "total").max() for m in _LABELS))
    axes.set_xlabel(f"CPU-seconds, median and range (threads: {result.threads})")
    shape = result.shape
    axes.set_title(
        f"Attention of {shape.queries:,} queries to {shape.context:,} keys, {shape.heads} heads of "
        f"{shape.head_dim}, {shape.dtype}",
        fontsize=12,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, format="png")


def write_benchmark(result: AttentionBenchmark, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``attention.json`` and ``attention.png`` into a folder, see `write_report`.

    Args:
        result: of `bench_attention`.
        folder: made if it is not there.

    Returns:
        The files.
    """
    return write_report(
        folder, "attention", result.to_json(), lambda path: draw_benchmark(result, path)
    )


def write_report(
    folder: str | os.PathLike[str],
    name: str,
    content: dict[str, Any],
    draw: Callable[[Path], None],
) -> list[Path]:
    """Write ``<name>.json`` and ``<name>.png`` into a folder; each is whole or absent.

    Args:
        folder: made if it is not there.
        name: of the files.
        content: of the JSON file.
        draw: writes a PNG to the path that it is given.

    Returns:
        The files.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files = [target / f"{name}.json", target / f"{name}.png"]
    aside = [file.with_name(file.name + ".partial") for file in files]
    aside[0].write_text(json.dumps(content, indent=1) + "\n")
    draw(aside[1])
    for partial, file in zip(aside, files, strict=True):
        os.replace(partial, file)
    return files


class Result(Protocol):
    """What a benchmark found."""

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        ...


def reported[T: Result](
    name: str, result: T, show: Callable[[T], None], draw: Callable[[T, Path], None]
) -> tuple[dict[str, Any], Callable[[], None], Callable[[str], list[Path]]]:
    """A result for a program, for a person, and a way to write both into a folder.

    Args:
        name: of the files, see `write_report`.
        result: of the benchmark.
        show: prints it.
        draw: writes its PNG.
    """
    content = result.to_json()
    return (
        content,
        lambda: show(result),
        lambda folder: write_report(folder, name, content, lambda path: draw(result, path)),
    )
