"""Plans as one picture: what context costs, who holds which part of it, and who waits for whom."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan
from megatron_splitkv.plan.pricing import price_chunks

# Light where a key is read by nobody, dark where many read it.
_COST = LinearSegmentedColormap.from_list("cost", ["#dfe6ee", "#8fb8de", "#2a78b8", "#0b2f5c"])
_WORK, _OWN_BLOCKS, _WAITING = "#2a78b8", "#333333", "#D55E00"
_BINS = 1200  # about one a pixel of the profile
_MAX_DOCUMENT_LINES = 40
_FORMATS = ("png", "svg")


def draw_plan(plan: ContextPlan, path: str | os.PathLike[str]) -> None:
    """Draw a plan below contiguous and zigzag rows for the same blocks, see `draw_plans`.

    Args:
        plan: what to draw.
        path: as there.
    """
    baselines = [
        build_plan(
            plan.layout, plan.context_length, plan.cp_size, strategy=name, windows=plan.windows
        )
        for name in ("none", "zigzag")
        if name != plan.strategy
    ]
    draw_plans([*baselines, plan], path)


def draw_plans(plans: Sequence[ContextPlan], path: str | os.PathLike[str]) -> None:
    """Write a picture that compares plans of one micro-batch.

    On top, how many query rows read the key at each context position. Below, for every plan, a line
    a rank: at the left the positions that it holds, as dark as they are costly, at the right the
    work that they make, and how long the rank waits for the busiest. The time that this takes does
    not grow with the context length, and no global state of matplotlib is touched.

    Args:
        plans: at least one; of the same blocks and ranks.
        path: a file whose name ends in .png or .svg; it is whole or as it was.

    Raises:
        ConfigError: another ending.
    """
    picture_format(path)
    first = plans[0]
    figure = Figure(figsize=(13, 2.6 + 1.75 * len(plans)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{first.context_length:,} context rows on {first.cp_size} ranks, "
        f"{int(first.layout.block_keep_mask.sum()):,} draft blocks of {first.layout.block_size}",
        fontsize=15,
    )
    ratios = [1.15] + [1.0] * len(plans)
    grid = figure.add_gridspec(1 + len(plans), 2, width_ratios=[2.5, 1], height_ratios=ratios)
    profile = figure.add_subplot(grid[0, 0])
    _draw_profile(profile, first)
    _draw_key(figure, grid[0, 1])
    longest = max(_relative(plan).max(initial=1.0) for plan in plans)
    for i, plan in enumerate(plans):
        owners = figure.add_subplot(grid[i + 1, 0], sharex=profile)
        bars = figure.add_subplot(grid[i + 1, 1])
        _draw_owners(owners, plan)
        _draw_work(bars, plan, longest)
        for axes in (owners, bars) if i < len(plans) - 1 else ():
            axes.tick_params(labelbottom=False)
    owners.set_xlabel("position in the packed context (tokens)", fontsize=11)
    owners.xaxis.set_major_formatter(EngFormatter(sep=""))
    bars.set_xlabel("work of a rank, % of the mean", fontsize=11)
    save_figure(figure, path)


def picture_format(path: str | os.PathLike[str]) -> str:
    """`png` or `svg`, by the ending of a file's name.

    Raises:
        ConfigError: another ending.
    """
    ending = Path(path).suffix.lower().removeprefix(".")
    if ending not in _FORMATS:
        raise ConfigError(f"{os.fspath(path) or 'no name'}: pictures are written as .png or .svg")
    return ending


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before the work.

    Args:
        path: see `draw_plans`.

    Raises:
        ConfigError: its ending, or it is a folder, or its own folder is missing or read-only.
    """
    picture_format(path)
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"{os.fspath(path)} is a folder; name a picture in it")
    if not folder.is_dir():
        raise ConfigError(f"{os.fspath(path)}: its folder does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{os.fspath(path)}: its folder may not be written to")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure beside its place, then move it there: the file is whole or as it was.

    Args:
        figure: what to write.
        path: see `picture_format`.
    """
    partial = Path(path).with_name(Path(path).name + ".partial")
    try:
        figure.savefig(partial, format=picture_format(path))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _draw_profile(axes: Axes, plan: ContextPlan) -> None:
    """Mean cost of the keys of each bin."""
    edges = np.unique(np.linspace(0, plan.context_length, _BINS + 1).astype(np.int64))
    height = _cost(plan, edges)
    highest = max(float(height.max(initial=0)), 1.0)
    _add_boxes(axes, edges[:-1], edges[1:], 0 * height, height, height / highest)
    axes.set_xlim(0, max(plan.context_length, 1))
    axes.set_ylim(0, 1.25 * highest)
    axes.set_ylabel("query rows\nthat read a key", fontsize=11)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
    starts = _document_starts(plan)
    for i, start in enumerate(starts):
        axes.axvline(start, color="black", linestyle="--", linewidth=0.8)
        if (*starts[1:], plan.context_length)[i] - start > 0.1 * plan.context_length:
            axes.text(
                start + 0.006 * plan.context_length,
                1.22 * highest,
                f"document {i}",
                fontsize=10,
                va="top",
            )


def _draw_owners(axes: Axes, plan: ContextPlan) -> None:
    """A line a rank with the positions that it holds; pieces never straddle two chunks."""
    length = plan.context_length
    bins = np.linspace(0, length, _BINS + 1).astype(np.int64)
    edges = np.union1d(bins, plan.chunk_bounds)
    chunk = np.searchsorted(plan.chunk_bounds, edges[:-1], side="right") - 1
    owner = plan.chunk_owner[chunk]
    cost = _cost(plan, edges)
    # A chunk that is narrower than a pixel is still to be seen.
    right = np.maximum(edges[1:], edges[:-1] + length // _BINS)
    _add_boxes(
        axes, edges[:-1], right, owner - 0.5, owner + 0.5, cost / max(1.0, cost.max(initial=0))
    )
    for start in _document_starts(plan):
        axes.axvline(start, color="black", linestyle="--", linewidth=0.8)
    _rank_axis(axes, plan)
    axes.set_ylabel("rank", fontsize=10)
    axes.set_facecolor("white")
    axes.set_title(plan.strategy, fontsize=12, loc="left", fontweight="bold")
    imbalance = f"{100 * plan.imbalance:.3g} %"
    axes.set_title(f"the busiest rank has {imbalance} more than the mean", fontsize=12, loc="right")


def _draw_work(axes: Axes, plan: ContextPlan, longest: float) -> None:
    """Work of every rank against contexts and own blocks, and the wait for the busiest rank."""
    percent = 100 * _relative(plan)
    own = 100 * _relative(plan, plan.work - plan.context_work)
    busiest = np.full_like(percent, percent.max(initial=0))
    _draw_bars(axes, np.zeros_like(percent), percent - own, color=_WORK)
    _draw_bars(axes, percent - own, percent, color=_OWN_BLOCKS)
    _draw_bars(
        axes,
        percent,
        busiest,
        facecolor="#fbe3d6",
        edgecolor=_WAITING,
        hatch="////" if plan.cp_size <= 16 else None,
        linewidth=0,
    )
    axes.axvline(100, color="black", linestyle=":", linewidth=1.4)
    axes.set_xlim(0, 104 * longest)
    _rank_axis(axes, plan)
    if plan.cp_size <= 16:
        for rank in range(plan.cp_size - 1):
            axes.axhline(rank + 0.5, color="white", linewidth=1.0)
    waiting = 100 * (1 - 100 / float(busiest[0])) if busiest[0] else 0.0
    axes.set_title(f"ranks wait {waiting:.3g} % of the time", fontsize=12, loc="left")


def _draw_bars(
    axes: Axes, left: NDArray[np.float64], right: NDArray[np.float64], **style: Any
) -> None:
    """A horizontal bar a rank, one above the other, in a single artist."""
    edges = np.arange(left.size + 1) - 0.5
    axes.stairs(right, edges, baseline=left, orientation="horizontal", fill=True, **style)


def _draw_key(figure: Figure, place: SubplotSpec) -> None:
    axes = figure.add_subplot(place)
    axes.axis("off")
    axes.legend(
        handles=[
            Patch(facecolor=_COST(0.0), label="context that nobody reads"),
            Patch(facecolor=_COST(1.0), label="context that most queries read"),
            Patch(facecolor=_WORK, label="work on the context"),
            Patch(facecolor=_OWN_BLOCKS, label="work on own draft blocks"),
            Patch(
                facecolor="#fbe3d6",
                edgecolor=_WAITING,
                hatch="////",
                linewidth=0,
                label="waiting for the busiest rank",
            ),
            Line2D([], [], color="black", linestyle=":", label="mean work"),
            Line2D([], [], color="black", linestyle="--", label="a document begins"),
        ],
        loc="center left",
        fontsize=10,
        frameon=False,
    )


def _rank_axis(axes: Axes, plan: ContextPlan) -> None:
    axes.set_ylim(plan.cp_size - 0.5, -0.5)  # rank 0 on top
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.spines[["top", "right"]].set_visible(False)


def _relative(plan: ContextPlan, work: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Work by rank, of all the mean is 1."""
    return (plan.work if work is None else work) / max(1.0, float(plan.work.mean()))


def _cost(plan: ContextPlan, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Query rows that read a key, a mean over the keys between two edges and over the layers."""
    rows = np.maximum(np.diff(edges), 1)
    return price_chunks(plan.layout, edges, plan.windows) / rows / len(plan.windows)


def _document_starts(plan: ContextPlan) -> list[int]:
    starts: list[int] = np.unique(plan.layout.document_starts).tolist()
    return starts if len(starts) <= _MAX_DOCUMENT_LINES else []


def _add_boxes(
    axes: Axes,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    bottom: NDArray[np.floating],
    top: NDArray[np.floating],
    shade: NDArray[np.float64],
) -> None:
    """One flat rectangle each, all in a single artist, which an SVG holds as a picture."""
    corners = np.stack(
        [
            np.stack([left, bottom], axis=1),
            np.stack([left, top], axis=1),
            np.stack([right, top], axis=1),
            np.stack([right, bottom], axis=1),
        ],
        axis=1,
    )
    boxes = PolyCollection(
        list(corners), facecolors=_COST(shade), edgecolors="none", antialiaseds=False
    )
    boxes.set_rasterized(True)
    axes.add_collection(boxes)
