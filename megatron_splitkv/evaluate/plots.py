"""Curves of a training and the picture of an evaluation, as PNG files.

Figures are made without pyplot: no window, no global state, no default style to inherit.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_splitkv.evaluate.report import LABELS, context_label
from megatron_splitkv.evaluate.result import TRAINED, ContextBin, EvaluationResult

# Okabe and Ito's palette, distinguishable under the common colour-vision deficiencies.
_COLOURS = {
    TRAINED: "#0072B2",
    "untrained": "#999999",
    "no_context": "#E69F00",
    "ngram": "#009E73",
}
_VALIDATION = "#D55E00"
_MARKERS = {TRAINED: "o", "untrained": "v", "no_context": "s", "ngram": "^"}


@dataclass(frozen=True)
class Curve:
    """Values over training iterations."""

    iterations: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class TrainingCurves:
    """What a training log holds; empty curves are left out of the picture.

    Args:
        train_loss: loss of the training batches.
        valid_loss: loss of the validation batches.
        train_accept_len: simulated acceptance length on training batches.
        valid_accept_len: the same on validation batches.
    """

    train_loss: Curve
    valid_loss: Curve = field(default_factory=lambda: Curve([], []))
    train_accept_len: Curve = field(default_factory=lambda: Curve([], []))
    valid_accept_len: Curve = field(default_factory=lambda: Curve([], []))


def draw_training(curves: TrainingCurves, path: str | os.PathLike[str]) -> None:
    """Draw loss and simulated acceptance length over the iterations.

    Args:
        curves: of the training log.
        path: the PNG file.
    """
    panels = [("loss", "nats per token, weighted", curves.train_loss, curves.valid_loss)]
    if curves.train_accept_len.values or curves.valid_accept_len.values:
        panels.append(
            (
                "simulated acceptance length",
                "tokens per draft step",
                curves.train_accept_len,
                curves.valid_accept_len,
            )
        )
    figure = _figure(width=5.6 * len(panels))
    for i, (title, unit, train, valid) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        _style(axes, f"Training: {title}", "iteration", unit)
        axes.plot(train.iterations, train.values, color=_COLOURS[TRAINED], label="training")
        if valid.values:
            axes.plot(valid.iterations, valid.values, "o-", color=_VALIDATION, label="validation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)
    figure.savefig(path, format="png")


def draw_acceptance(result: EvaluationResult, path: str | os.PathLike[str]) -> None:
    """Draw acceptance lengths, their distribution, acceptance by slot and by context length.

    Args:
        result: of `evaluate_drafter`.
        path: the PNG file.
    """
    bins = result.by_context()
    panels = 4 if len(bins) > 1 else 3
    figure = _figure(width=5.2 * panels)
    grid = figure.add_gridspec(1, panels, width_ratios=[1.05] + [1] * (panels - 1))
    _draw_lengths(figure.add_subplot(grid[0]), result)
    _draw_histogram(figure.add_subplot(grid[1]), result)
    _draw_slots(figure.add_subplot(grid[2]), result)
    if len(bins) > 1:
        _draw_contexts(figure.add_subplot(grid[3]), result, bins)
    figure.savefig(path, format="png")


def _draw_lengths(axes: Axes, result: EvaluationResult) -> None:
    _style(axes, "Acceptance length, 95 % interval", "tokens per draft step", "")
    lengths, intervals = result.accept_len, result.intervals
    for row, (method, length) in enumerate(lengths.items()):
        axes.barh(row, length, height=0.62, color=_COLOURS[method])
        spread, right = intervals[method], length
        if spread is not None:
            right = max(right, spread.high)
            error = [[max(0.0, length - spread.low)], [max(0.0, spread.high - length)]]
            axes.errorbar(length, row, xerr=error, fmt="none", ecolor="black", capsize=4)
        axes.annotate(
            f"{length:.2f}",
            (right, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if method == TRAINED else "normal",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(len(lengths)), [LABELS[method] for method in lengths])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * (result.num_proposals + 1))  # room for the longest bar's number
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.grid(axis="y", visible=False)


def _draw_histogram(axes: Axes, result: EvaluationResult) -> None:
    counts = result.histogram(TRAINED)
    total = sum(counts)
    _style(
        axes,
        f"Trained drafter: {total:,} draft steps",
        "tokens that the step added",
        "share of draft steps",
    )
    lengths = range(1, result.num_proposals + 2)
    axes.bar(lengths, [100 * count / total for count in counts], color=_COLOURS[TRAINED])
    axes.set_xticks(list(lengths) if result.num_proposals <= 15 else list(lengths)[::4])
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.grid(axis="x", visible=False)


def _draw_slots(axes: Axes, result: EvaluationResult) -> None:
    _style(axes, "All proposals up to a slot accepted", "draft slot", "share of draft steps")
    for method in result.steps:
        rates = result.slot_acceptance(method)
        points = [(slot, 100 * rate) for slot, rate in enumerate(rates, 1) if rate is not None]
        axes.plot(
            [slot for slot, _ in points],
            [rate for _, rate in points],
            marker=_MARKERS[method],
            color=_COLOURS[method],
            label=LABELS[method],
            linewidth=2.5 if method == TRAINED else 1.5,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.set_ylim(-2, 102)
    axes.legend(frameon=False)


def _draw_contexts(axes: Axes, result: EvaluationResult, bins: Sequence[ContextBin]) -> None:
    _style(axes, "Acceptance by context", "tokens before the block", "tokens per draft step")
    for method in result.steps:
        lengths = [context.accept_len[method] for context in bins]
        points = [(i, length) for i, length in enumerate(lengths) if length is not None]
        axes.plot(
            [i for i, _ in points],
            [length for _, length in points],
            marker=_MARKERS[method],
            color=_COLOURS[method],
            label=LABELS[method],
            linewidth=2.5 if method == TRAINED else 1.5,
        )
    axes.set_xticks(range(len(bins)), [context_label(context) for context in bins])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _figure(width: float) -> Figure:
    figure = Figure(figsize=(width, 4.3), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=13, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
