"""The study as pictures: markers were measured (by the paper), lines are modelled."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

from megatron_splitkv.scale.beyond import rows_text
from megatron_splitkv.scale.methods import METHODS
from megatron_splitkv.scale.paper import METHODS as COMPARED
from megatron_splitkv.scale.paper import SETTINGS, points_of
from megatron_splitkv.scale.study import MachineStudy
from megatron_splitkv.scale.tables import TITLES

# Okabe and Ito's palette.
_COLOURS = {
    "splitkv": "#D55E00",
    "a2a": "#0072B2",
    "p2p": "#009E73",
    "ringx": "#CC79A7",
    "lv_xattn": "#E69F00",
    "all_gather": "#56B4E9",
    "best": "#000000",
}
_MARKERS = {"splitkv": "o", "a2a": "s", "p2p": "^", "ringx": "v", "lv_xattn": "D"}
_STYLES = ("-", "--")
_OURS = (0, (1, 1))
_SECONDS = (0.3, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw_setting(
    studies: Sequence[MachineStudy], setting: str, path: str | os.PathLike[str]
) -> None:
    """One panel a drafter: lines of every method, one style a machine, and the paper's bars.

    Args:
        studies: one a machine, of the same drafters.
        setting: one of `SETTINGS`.
        path: the PNG file.
    """
    models = list(dict.fromkeys(p.bar.model for p in studies[0].predictions))
    figure = _figure(6.2 * len(models), 5.4)
    grid = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(grid, models, strict=True):
        for style, study in zip(_STYLES, studies, strict=False):
            _draw_lines(axes, study, setting, model, style)
        if studies[0].machine.is_paper:
            _draw_bars(axes, studies[0], setting, model)
        _finish(axes, points_of(setting), model)
        axes.set_xlabel("context rows a query row, S / Q" if setting == "ratio" else "ranks, P")
    grid[0].set_ylabel("seconds a training step")
    figure.suptitle(f"Drafter training step, {TITLES[setting]}", x=0.01, ha="left", fontsize=12)
    figure.legend(
        handles=_legend(studies), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    figure.savefig(path, format="png")


def draw_beyond(study: MachineStudy, path: str | os.PathLike[str]) -> None:
    """One row a drafter, one panel a context length: modelled seconds over rank counts."""
    models, cells = list(study.beyond), next(iter(study.beyond.values()))
    contexts = list(dict.fromkeys(cell.context_rows for cell in cells))
    figure = _figure(3.6 * len(contexts), 3.4 * len(models) + 0.9)
    grid = figure.subplots(len(models), len(contexts), sharex=True, squeeze=False)
    for row, model in zip(grid, models, strict=True):
        for axes, context in zip(row, contexts, strict=True):
            here = [cell for cell in study.beyond[model] if cell.context_rows == context]
            for method in (*COMPARED, "all_gather", "best"):
                points = [
                    (c.cp_size, c.seconds[c.best_of(own=True) if method == "best" else method])
                    for c in here
                    if method == "best" or method in c.seconds
                ]
                if points:
                    wide = 2.4 if method in ("splitkv", "best") else 1.3
                    dash = ":" if method == "best" else "-"
                    xs, ys = zip(*points, strict=True)
                    axes.plot(xs, ys, dash, color=_COLOURS[method], lw=wide)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{model}, S = {rows_text(context)}", fontsize=10, loc="left")
            axes.grid(which="major", color="#dddddd", lw=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            ticks = sorted({cell.cp_size for cell in cells})[::3]
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_major_formatter(ScalarFormatter())
    for axes in grid[-1]:
        axes.set_xlabel("ranks, P")
    for row in grid:
        row[0].set_ylabel("seconds a step")
    figure.suptitle(
        f"Past the paper: all modelled, nothing measured ({study.machine.label}; b = 8, Q = 64k)",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    lines = [
        Line2D([], [], color=_COLOURS[method], lw=2, label=METHODS[method].label)
        for method in (*COMPARED, "all_gather")
    ]
    lines.append(
        Line2D([], [], color=_COLOURS["best"], ls=":", lw=2.4, label="best Split-KV variant")
    )
    figure.legend(handles=lines, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def draw_study(studies: Sequence[MachineStudy], folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``scale-<setting>.png`` for what was studied; each file is whole or absent.

    Args:
        studies: one a machine.
        folder: made if it is not there.

    Returns:
        The files.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for setting in SETTINGS:
        if any(p.bar.setting == setting for p in studies[0].predictions):
            files.append(target / f"scale-{setting}.png")
            aside = files[-1].with_suffix(".partial")
            draw_setting(studies, setting, aside)
            os.replace(aside, files[-1])
    for n, study in enumerate(studies):
        if study.beyond:
            files.append(target / ("scale-beyond.png" if n == 0 else f"scale-beyond-{n + 1}.png"))
            aside = files[-1].with_suffix(".partial")
            draw_beyond(study, aside)
            os.replace(aside, files[-1])
    return files


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_lines(axes: Axes, study: MachineStudy, setting: str, model: str, style: str) -> None:
    for method in COMPARED:
        here = [
            p
            for p in study.predictions
            if (p.bar.setting, p.bar.model, p.bar.method) == (setting, model, method)
        ]
        xs, ys = [p.bar.x for p in here], [p.modelled.total for p in here]
        wide = 2.2 if method == "splitkv" else 1.3
        axes.plot(xs, ys, style, color=_COLOURS[method], lw=wide, zorder=2)
    if style == _STYLES[0]:
        points = points_of(setting)
        best = [study.best_variant(setting, model, x).seconds for x in points]
        axes.plot(points, best, linestyle=_OURS, color=_COLOURS["best"], lw=1.6, zorder=3)


def _draw_bars(axes: Axes, study: MachineStudy, setting: str, model: str) -> None:
    for p in study.predictions:
        if (p.bar.setting, p.bar.model) == (setting, model):
            colour = _COLOURS[p.bar.method]
            axes.plot(
                p.bar.x,
                p.bar.seconds,
                _MARKERS[p.bar.method],
                color=colour,
                markerfacecolor=colour if p.held_out else "white",
                ms=7,
                zorder=4,
            )


def _finish(axes: Axes, points: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(points)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_locator(FixedLocator(list(_SECONDS)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(studies: Sequence[MachineStudy]) -> list[Line2D]:
    handles = [
        Line2D(
            [],
            [],
            color=_COLOURS[m],
            marker=_MARKERS[m] if studies[0].machine.is_paper else "",
            label=METHODS[m].label,
        )
        for m in COMPARED
    ]
    grey = "#555555"
    handles += [
        Line2D([], [], color=grey, ls=style, label=f"modelled, {study.machine.label}")
        for style, study in zip(_STYLES, studies, strict=False)
    ]
    label = "modelled, ours, best places"
    handles.append(Line2D([], [], color=_COLOURS["best"], ls=_OURS, lw=1.6, label=label))
    if studies[0].machine.is_paper:
        for face, label in ((grey, "measured (paper)"), ("white", "measured, calibrates")):
            handles.append(
                Line2D([], [], color=grey, ls="", marker="o", markerfacecolor=face, label=label)
            )
    return handles
