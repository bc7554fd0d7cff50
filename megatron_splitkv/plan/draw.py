"""A plan as a picture: who owns which context chunk, what it costs, and how even the ranks are."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan
from megatron_splitkv.plan.pricing import price_chunks

# Okabe and Ito's palette, distinguishable under the common colour-vision deficiencies.
_PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)
_OWN_BLOCKS = "#333333"
_BINS = 1500  # about one per pixel of the profile
_MAX_DOCUMENT_LINES = 40
_BASELINES = ("none", "zigzag")


def draw_plan(plan: ContextPlan, path: str | os.PathLike[str]) -> None:
    """Write a PNG: the cost of every context position by owner, and the work of every rank.

    Above, the number of query rows that read each context key, coloured by the rank that owns the
    key, over a strip of the owners; documents are set apart by dashed lines. Below, the work per
    rank of this plan beside contiguous and zigzag rows for the same blocks, on one scale. The
    time does not grow with the context length, and no global state of matplotlib is touched.

    Args:
        plan: what to draw.
        path: the PNG file; its folder exists.
    """
    figure = Figure(figsize=(12, 8.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    blocks = plan.layout
    figure.suptitle(
        f"Plan '{plan.strategy}': {plan.context_length:,} context rows on {plan.cp_size} ranks, "
        f"{int(blocks.block_keep_mask.sum()):,} draft blocks of {blocks.block_size}",
        fontsize=15,
    )
    grid = figure.add_gridspec(3, 1, height_ratios=[10, 1, 9])
    profile = figure.add_subplot(grid[0])
    strip = figure.add_subplot(grid[1], sharex=profile)
    colours = _rank_colours(plan.cp_size)
    _draw_profile(profile, plan, colours)
    _draw_owners(strip, plan, colours)
    _draw_legend(figure, (profile, strip), colours)

    baselines = [name for name in _BASELINES if name != plan.strategy]
    plans = [plan] + [
        build_plan(blocks, plan.context_length, plan.cp_size, strategy=name) for name in baselines
    ]
    columns = grid[2].subgridspec(1, len(plans))
    top = max(float(other.work.max()) for other in plans)
    for i, other in enumerate(plans):
        bars = figure.add_subplot(columns[i])
        _draw_work(bars, other, colours, top, is_this_plan=i == 0)
        if i == 0:
            bars.set_ylabel("work (query-key pairs)", fontsize=12)
        else:
            bars.tick_params(labelleft=False)
    figure.savefig(path, format="png")


def _draw_profile(axes: Axes, plan: ContextPlan, colours: NDArray[np.float64]) -> None:
    """Mean cost of the keys of each bin; bins never straddle two chunks."""
    bins = np.linspace(0, plan.context_length, _BINS + 1).astype(np.int64)
    edges = np.union1d(bins, plan.chunk_bounds)
    rows = np.maximum(np.diff(edges), 1)  # an empty context has one bin of no rows
    height = price_chunks(plan.layout, edges) / rows
    chunk = np.searchsorted(plan.chunk_bounds, edges[:-1], side="right") - 1
    _add_columns(axes, edges[:-1], edges[1:], height, colours, plan.chunk_owner[chunk])
    axes.set_xlim(0, max(plan.context_length, 1))
    highest = max(float(height.max(initial=0)), 1.0)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_ylabel("query rows that read a key", fontsize=12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(labelbottom=False, labelsize=11)

    starts = np.unique(plan.layout.document_starts)
    if starts.size <= _MAX_DOCUMENT_LINES:
        for i, start in enumerate(starts):
            axes.axvline(start, color="black", linestyle="--", linewidth=1)
            width = (*starts[1:], plan.context_length)[i] - start
            if width > 0.1 * plan.context_length:
                axes.text(
                    start + 0.006 * plan.context_length,
                    1.1 * highest,
                    f"document {i}",
                    fontsize=10,
                    va="top",
                )


def _draw_owners(axes: Axes, plan: ContextPlan, colours: NDArray[np.float64]) -> None:
    bounds = plan.chunk_bounds
    height = np.ones(plan.chunk_owner.size)
    _add_columns(axes, bounds[:-1], bounds[1:], height, colours, plan.chunk_owner)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("owner", fontsize=12, rotation=0, ha="right", va="center")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("position in the packed context (tokens)", fontsize=12)
    axes.tick_params(labelsize=11)


def _draw_work(
    axes: Axes, plan: ContextPlan, colours: NDArray[np.float64], top: float, *, is_this_plan: bool
) -> None:
    ranks = np.arange(plan.cp_size)
    own = plan.work - plan.context_work
    axes.bar(ranks, plan.context_work, color=colours[ranks], width=0.85)
    axes.bar(ranks, own, bottom=plan.context_work, color=_OWN_BLOCKS, width=0.85)
    mean = float(plan.work.mean())
    axes.axhline(mean, color="black", linestyle=":", linewidth=1.3)
    axes.set_ylim(0, 1.05 * max(top, 1.0))
    title = f"{plan.strategy}: imbalance {100 * plan.imbalance:.2f} %"
    axes.set_title(title, fontsize=13, fontweight="bold" if is_this_plan else "normal")
    axes.set_xlabel("rank", fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=11)


def _draw_legend(figure: Figure, axes: Sequence[Axes], colours: NDArray[np.float64]) -> None:
    """Below everything; many ranks get a colour scale instead of names."""
    ranks = range(len(colours))
    entries: list[Artist] = []
    if len(colours) <= len(_PALETTE):
        entries += [Patch(color=colours[rank], label=f"rank {rank}") for rank in ranks]
    else:
        norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours))
        scale = ScalarMappable(norm, ListedColormap(colours))
        bar = figure.colorbar(scale, ax=list(axes), pad=0.01)
        bar.set_label("rank that owns the key", fontsize=12)
        bar.set_ticks(np.unique(np.linspace(0, len(colours) - 1, 9).astype(int)).tolist())
        bar.minorticks_off()
    entries += [
        Patch(color=_OWN_BLOCKS, label="own blocks"),
        Line2D([], [], color="black", linestyle=":", label="mean"),
    ]
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=len(entries),
        fontsize=11,
        handlelength=1.4,
        columnspacing=1.3,
        frameon=False,
    )


def _add_columns(
    axes: Axes,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    height: NDArray[np.float64],
    colours: NDArray[np.float64],
    owner: NDArray[np.int64],
) -> None:
    """One flat rectangle a column, all in a single artist."""
    zero = np.zeros(left.size)
    corners = np.stack(
        [
            np.stack([left, zero], axis=1),
            np.stack([left, height], axis=1),
            np.stack([right, height], axis=1),
            np.stack([right, zero], axis=1),
        ],
        axis=1,
    )
    axes.add_collection(
        PolyCollection(
            list(corners), facecolors=colours[owner], edgecolors="none", antialiaseds=False
        )
    )


def _rank_colours(cp_size: int) -> NDArray[np.float64]:
    """One RGBA colour a rank, float64[P, 4]."""
    if cp_size <= len(_PALETTE):
        return to_rgba_array(_PALETTE[:cp_size])
    return np.asarray(colormaps["viridis"](np.linspace(0, 1, cp_size)))
