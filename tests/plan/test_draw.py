import struct
import sys
import time

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.draw import draw_plan
from tests.plan.layouts import fig5_layout


@pytest.fixture
def saved_figures(monkeypatch):
    """The figures that `draw_plan` writes, to look at their contents."""
    figures = []
    save = Figure.savefig

    def remember(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", header[16:24])


def bars(figure):
    return [axes for axes in figure.axes if axes.get_xlabel() == "rank"]


def test_this_plan_beside_none_and_zigzag(tmp_path, saved_figures):
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=3)
    draw_plan(plan, tmp_path / "plan.png")
    assert png_size(tmp_path / "plan.png") >= (1200, 800)
    (figure,) = saved_figures
    panels = bars(figure)
    assert [panel.get_title() for panel in panels] == [
        "lpt: imbalance 0.00 %",
        "none: imbalance 55.56 %",
        "zigzag: imbalance 16.67 %",
    ]
    assert len({panel.get_ylim() for panel in panels}) == 1
    heights = [bar.get_y() + bar.get_height() for bar in panels[2].patches[4:]]
    assert heights == [32, 32, 38, 42]


def test_profile_is_the_cost_per_position(tmp_path, saved_figures):
    layout, length = fig5_layout()
    draw_plan(build_plan(layout, length, 4, strategy="zigzag"), tmp_path / "plan.png")
    columns = saved_figures[0].axes[0].collections[0].get_paths()
    tops = [path.get_extents().y1 for path in columns]
    assert tops == [8] * 6 + [6] * 4 + [4, 2] + [0] * 4 + [8, 8, 6, 6, 4, 2, 0, 0]
    assert [panel.get_title()[:6] for panel in bars(saved_figures[0])] == ["zigzag", "none: "]


@pytest.mark.parametrize("cp_size", [1, 8, 9, 64])
def test_long_contexts_are_quick_at_any_number_of_ranks(cp_size, tmp_path, saved_figures):
    length = 64 * 2**20
    anchors = np.arange(1, 2049) * (length // 2049)
    layout = BlockLayout(anchors, np.zeros(2048, int), np.ones(2048, bool), 16)
    begin = time.process_time()
    draw_plan(build_plan(layout, length, cp_size), tmp_path / "plan.png")
    assert time.process_time() - begin < 5
    columns = saved_figures[0].axes[0].collections[0].get_paths()
    tops = np.array([path.get_extents().y1 for path in columns])
    assert tops[0] == pytest.approx(
        2048 * 16, rel=1e-3
    )  # query rows per key, however many keys a column stands for
    assert (np.diff(tops) <= 0).all()
    assert png_size(tmp_path / "plan.png") >= (1200, 800)


def test_nothing_to_draw(tmp_path):
    draw_plan(build_plan(BlockLayout([], [], [], 4), 0, 3), str(tmp_path / "plan.png"))
    assert png_size(tmp_path / "plan.png") >= (1200, 800)


def test_global_state_of_matplotlib_is_left_alone(tmp_path):
    layout, length = fig5_layout()
    settings, had_pyplot = dict(mpl.rcParams), "matplotlib.pyplot" in sys.modules
    draw_plan(build_plan(layout, length, 2), tmp_path / "plan.png")
    assert dict(mpl.rcParams) == settings
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
