"""The quality study as a table and a picture, beside the paper's.

Source:
    Split-KV paper, Appendix A, Table 1: means over five tasks.
"""

import os
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.bench.quality import QualityBenchmark
from megatron_splitkv.bench.quality_shape import FIX_Q, FIX_S, Point
from megatron_splitkv.bench.timing import Interval


class PaperStudy(NamedTuple):
    """One study of the paper; the shared point is where `scaled` is `shared`.

    Args:
        scaled: S or Q of the points.
        shared: S or Q of the point that belongs to both studies.
        lengths: acceptance lengths by target.
    """

    scaled: tuple[int, ...]
    shared: int
    lengths: dict[str, tuple[float, ...]]


PAPER = {
    FIX_Q: PaperStudy(
        (4096, 16384, 65536),
        65536,
        {"Qwen3.5-35B-A3B": (6.08, 6.13, 6.12), "Qwen3.5-9B": (5.70, 5.74, 5.73)},
    ),
    FIX_S: PaperStudy(
        (2048, 4096, 8192, 16384),
        8192,
        {"Qwen3.5-35B-A3B": (5.82, 5.98, 6.12, 6.18), "Qwen3.5-9B": (5.48, 5.61, 5.73, 5.82)},
    ),
}
_TITLES = {FIX_Q: "Fix Q, scale S", FIX_S: "Fix S, scale Q"}
# Okabe and Ito's palette.
_OURS, _PAPER = "#0072B2", {"Qwen3.5-35B-A3B": "#D55E00", "Qwen3.5-9B": "#E69F00"}
_LINES = ("#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#000000")


def print_quality(result: QualityBenchmark, console: Console | None = None) -> None:
    """Print both studies, acceptance by context, and what the paper found.

    Args:
        result: of `bench_quality`.
        console: where to; standard output when None.
    """
    console = console or Console()
    shape = result.shape
    console.print(
        f"Target: {result.target['target']}, {result.target['parameters']:,} parameters, "
        f"{result.target['steps']} steps, {result.target['loss']:.2f} nats a byte. Drafters: "
        f"{shape.layers} layers, blocks of {shape.block_size}, {shape.steps} steps of "
        f"{shape.samples} samples out of {shape.documents} with {shape.length:,} tokens.",
        highlight=False,
    )
    for study, points in shape.studies.items():
        console.print(_table(result, study, points))
        console.print(_finding(result, study), highlight=False)
    ngram = result.scores[shape.shared].ngram
    console.print(f"n-gram repeat on the same texts: {ngram:.2f}", highlight=False)
    texts = "all texts equal" if result.greedy_equal else "SOME TEXTS DIFFER FROM"
    console.print(
        "Tokens a draft step, the target's own included; in brackets 95 % bootstrap intervals over "
        f"{shape.held_out} held-out samples, {shape.spoken} new tokens up to each context; {texts} "
        "plain greedy decoding. Each drafter was trained once: what another seed would change is "
        "in no interval.",
        style="dim" if result.greedy_equal else "bold red",
        highlight=False,
    )


def _table(result: QualityBenchmark, study: str, points: tuple[Point, ...]) -> Table:
    shape = result.shape
    table = Table(title=_TITLES[study], title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("\nS", "\nQ", "cut / kept\n%", "all prompts\n[95 %]"):
        table.add_column(heading, justify="right", no_wrap=True)
    for context in shape.contexts:
        table.add_column(f"at\n{context:,}", justify="right", no_wrap=True)
    table.add_column("paper\n35B / 9B", justify="right", no_wrap=True)
    for point in points:
        cut = result.truncation(point.context)
        table.add_row(
            f"{point.context:,}",
            f"{shape.queries(point):,}",
            f"{100 * cut['truncated']:.0f} / {100 * cut['kept']:.0f}",
            _bracketed(result.accept_len(point)),
            *(f"{result.accept_len(point, context).estimate:.2f}" for context in shape.contexts),
            _paper_cell(result, study, point),
            style="bold" if point == shape.shared else None,
        )
    return table


def _paper_cell(result: QualityBenchmark, study: str, point: Point) -> str:
    """The paper's point at the same ratio to its shared one, if it has one."""
    paper = PAPER[study]
    ratio = _scaled(result, study, point) / _scaled(result, study, result.shape.shared)
    at = [i for i, value in enumerate(paper.scaled) if value / paper.shared == ratio]
    return " / ".join(f"{lengths[at[0]]:.2f}" for lengths in paper.lengths.values()) if at else ""


def _finding(result: QualityBenchmark, study: str) -> str:
    gains = result.gains(study)
    steps = ", ".join(f"{gain.estimate:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]" for gain in gains)
    paper = []
    for name, lengths in PAPER[study].lengths.items():
        span = 100 * (max(lengths) / min(lengths) - 1)
        paper.append(f"{span:.1f} % ({name}: {', '.join(f'{length:.2f}' for length in lengths)})")
    return (
        f"Largest over smallest: {100 * result.span(study):.1f} %; from row to row {steps}. "
        f"Paper: {'; '.join(paper)}."
    )


def draw_quality(result: QualityBenchmark, path: str | os.PathLike[str]) -> None:
    """Draw both studies relative to their shared point, and acceptance by context, as a PNG.

    Args:
        result: of `bench_quality`.
        path: the PNG file.
    """
    figure = Figure(figsize=(15.5, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for axes, study in zip(panels, (FIX_Q, FIX_S), strict=False):
        _draw_study(axes, result, study)
    low = min(axes.get_ylim()[0] for axes in panels[:2])
    high = max(axes.get_ylim()[1] for axes in panels[:2])
    for axes in panels[:2]:
        axes.set_ylim(low, high)
    _draw_contexts(panels[2], result)
    figure.savefig(path, format="png")


def _draw_study(axes: Axes, result: QualityBenchmark, study: str) -> None:
    shape, paper = result.shape, PAPER[study]
    points = shape.studies[study]
    shared = _scaled(result, study, shape.shared)
    base = result.accept_len(shape.shared).estimate
    ratios = [result.ratio(point, shape.shared) for point in points]
    axes.errorbar(
        [_scaled(result, study, point) / shared for point in points],
        [ratio.estimate for ratio in ratios],
        yerr=np.transpose([_error(ratio) for ratio in ratios]),
        color=_OURS,
        marker="o",
        capsize=4,
        linewidth=2.4,
        label=f"here, 1 = {base:.2f} tokens",
    )
    for name, of in paper.lengths.items():
        base_of = of[paper.scaled.index(paper.shared)]
        axes.plot(
            [value / paper.shared for value in paper.scaled],
            [value / base_of for value in of],
            "s--",
            color=_PAPER[name],
            label=f"paper, {name}, 1 = {base_of:.2f}",
        )
    ours = "S" if study == FIX_Q else "Q"
    axes.set_xscale("log", base=2)
    axes.set_xlabel(
        f"{ours} / {ours} of the shared point (here {shared:,}; paper {paper.shared:,})"
    )
    axes.set_ylabel("acceptance length / shared point's")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    _plain(axes, _TITLES[study])


def _draw_contexts(axes: Axes, result: QualityBenchmark) -> None:
    contexts = result.shape.contexts
    for at, point in enumerate(result.shape.studies[FIX_Q]):
        lengths = [result.accept_len(point, context) for context in contexts]
        axes.errorbar(
            np.array(contexts) * 1.02 ** (at - len(contexts) / 2),  # intervals side by side
            [length.estimate for length in lengths],
            yerr=np.transpose([_error(length) for length in lengths]),
            color=_LINES[at % len(_LINES)],
            marker="o",
            markersize=4,
            capsize=3,
            label=f"trained with S = {point.context:,}",
        )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlabel("tokens of prompt and text")
    axes.set_ylabel("tokens a draft step")
    axes.legend(frameon=False, fontsize=9, loc="upper center", ncols=2)
    _plain(axes, "Fix Q: by context of the prompt")


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _scaled(result: QualityBenchmark, study: str, point: Point) -> int:
    """What the study scales."""
    return point.context if study == FIX_Q else result.shape.queries(point)


def _error(length: Interval) -> tuple[float, float]:
    return length.estimate - length.low, length.high - length.estimate


def _bracketed(length: Interval) -> str:
    return f"{length.estimate:.2f} [{length.low:.2f}, {length.high:.2f}]"
