import struct
import sys
import time
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.draw import draw_plan, draw_plans
from tests.plan.layouts import fig5_layout


@pytest.fixture
def saved_figures(monkeypatch):
    """The figures that are written, to look at their contents."""
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


def boxes(axes):
    """(left, bottom, right, top) of every box, in their order."""
    return [path.get_extents().extents.tolist() for path in axes.collections[0].get_paths()]


def owner_panels(figure):
    return [axes for axes in figure.axes if axes.get_ylabel() == "rank"]


def work_panels(figure):
    return [axes for axes in figure.axes if axes.get_title(loc="left").startswith("ranks wait")]


def test_this_plan_below_none_and_zigzag(tmp_path, saved_figures):
    layout, length = fig5_layout()
    draw_plan(build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=3), tmp_path / "p.png")
    assert png_size(tmp_path / "p.png") >= (1200, 800)
    (figure,) = saved_figures
    owners, work = owner_panels(figure), work_panels(figure)
    assert [panel.get_title(loc="left") for panel in owners] == ["none", "zigzag", "lpt"]
    assert [panel.get_title(loc="right") for panel in owners] == [
        f"the busiest rank has {percent} % more than the mean" for percent in ("55.6", "16.7", "0")
    ]
    # Busiest rank over the mean of 36: 56, 42 and 36.
    assert [panel.get_title(loc="left") for panel in work] == [
        f"ranks wait {share} % of the time" for share in ("35.7", "14.3", "0")
    ]
    assert len({panel.get_xlim() for panel in work}) == 1


def test_work_and_waiting_of_every_rank(tmp_path, saved_figures):
    """Zigzag's loads of the paper's Figure 5: 32, 32, 38, 42, of which 8 are own blocks."""
    layout, length = fig5_layout()
    draw_plans([build_plan(layout, length, 4, strategy="zigzag")], tmp_path / "plan.png")
    (panel,) = work_panels(saved_figures[0])
    bars = [bar.get_data() for bar in panel.patches]  # one artist a colour, however many ranks
    assert [bar.edges.tolist() for bar in bars] == [[-0.5, 0.5, 1.5, 2.5, 3.5]] * 3
    lefts = np.array([bar.baseline for bar in bars]) * 36 / 100
    widths = np.array([bar.values for bar in bars]) * 36 / 100 - lefts
    assert widths == pytest.approx(np.array([[24, 24, 30, 34], [8] * 4, [10, 10, 4, 0]]))
    assert lefts[2] == pytest.approx([32, 32, 38, 42])
    assert panel.get_ylim() == (3.5, -0.5)


def test_profile_is_the_cost_per_position(tmp_path, saved_figures):
    layout, length = fig5_layout()
    draw_plan(build_plan(layout, length, 4, strategy="zigzag"), tmp_path / "plan.png")
    tops = [top for *_, top in boxes(saved_figures[0].axes[0])]
    assert tops == [8] * 6 + [6] * 4 + [4, 2] + [0] * 4 + [8, 8, 6, 6, 4, 2, 0, 0]
    names = [panel.get_title(loc="left") for panel in owner_panels(saved_figures[0])]
    assert names == ["none", "zigzag"]


@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt", "balanced", "balanced-local"])
def test_every_position_lies_in_the_line_of_its_owner(strategy, tmp_path, saved_figures):
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 3, strategy=strategy, chunks_per_rank=2)
    draw_plans([plan], tmp_path / "plan.png")
    (panel,) = owner_panels(saved_figures[0])
    drawn = {
        (x, (bottom + top) / 2)
        for left, bottom, right, top in boxes(panel)
        for x in range(int(left), int(right))
    }
    assert drawn == {(x, rank) for rank in range(3) for x in plan.rows(rank).tolist()}


def test_layers_are_averaged(tmp_path, saved_figures):
    """Half of the layers see two positions back: slot 0 one key, slot 1 none of the context."""
    layout = BlockLayout([4], [0], [True], 2)
    draw_plans([build_plan(layout, 6, 2, windows=(None, 2))], tmp_path / "plan.png")
    assert [top for *_, top in boxes(saved_figures[0].axes[0])] == [1, 1, 1, 1.5, 0, 0]


@pytest.mark.parametrize("cp_size", [1, 17, 64])
def test_long_contexts_are_quick_at_any_number_of_ranks(cp_size, tmp_path, saved_figures):
    length = 64 * 2**20
    anchors = np.arange(1, 2049) * (length // 2049)
    layout = BlockLayout(anchors, np.zeros(2048, int), np.ones(2048, bool), 16)
    begin = time.process_time()
    draw_plan(build_plan(layout, length, cp_size), tmp_path / "plan.png")
    assert time.process_time() - begin < 10  # 64 M boxes would take minutes
    tops = np.array([top for *_, top in boxes(saved_figures[0].axes[0])])
    assert tops[0] == pytest.approx(2048 * 16, rel=1e-3)  # query rows a key, not a column
    assert (np.diff(tops) <= 0).all()
    widths = [right - left for left, _, right, _ in boxes(owner_panels(saved_figures[0])[-1])]
    assert min(widths) >= length // 1200  # no chunk is too narrow to be seen
    assert png_size(tmp_path / "plan.png") >= (1200, 800)


def test_nothing_to_draw(tmp_path):
    draw_plan(build_plan(BlockLayout([], [], [], 4), 0, 3), str(tmp_path / "plan.png"))
    assert png_size(tmp_path / "plan.png") >= (1200, 800)


def test_svg_keeps_its_text_and_stays_small(tmp_path):
    layout, length = fig5_layout()
    draw_plan(build_plan(layout, length, 2), tmp_path / "plan.SVG")
    root = ET.parse(tmp_path / "plan.SVG").getroot()
    assert root.tag.endswith("}svg")
    assert any(element.tag.endswith("}image") for element in root.iter())
    assert (tmp_path / "plan.SVG").stat().st_size < 1 << 20


def test_a_picture_is_whole_or_as_it_was(tmp_path, monkeypatch):
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 2)
    file = tmp_path / "plan.png"
    with pytest.raises(ConfigError, match=r"plan\.pdf: pictures are written as \.png or \.svg"):
        draw_plan(plan, tmp_path / "plan.pdf")
    file.write_text("before")

    def fail(self, path, **kwargs):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_plan(plan, file)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_global_state_of_matplotlib_is_left_alone(tmp_path):
    layout, length = fig5_layout()
    settings, had_pyplot = dict(mpl.rcParams), "matplotlib.pyplot" in sys.modules
    draw_plan(build_plan(layout, length, 2), tmp_path / "plan.png")
    assert dict(mpl.rcParams) == settings
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
