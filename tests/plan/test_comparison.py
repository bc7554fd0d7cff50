"""What strategies are compared by: every figure against its definition, row by row."""

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.comparison import (
    MicroBatch,
    compare_strategies,
    find_source,
    time_strategies,
)
from megatron_splitkv.plan.tiles import tile_imbalance
from tests.plan.layouts import fig5_layout, layout_of, visible, visible_in_window

STRATEGIES = ("none", "zigzag", "lpt", "balanced", "balanced-local")


def fig5_batch():
    layout, _ = fig5_layout()
    return MicroBatch(layout, np.array([0, 16, 24]))


def test_the_papers_example():
    result = compare_strategies([fig5_batch()], 4, STRATEGIES, chunks_per_rank=3)
    assert result.sources == ["zigzag in every document"]
    assert tuple(result.figures) == tuple(result.plans) == STRATEGIES
    figures = {name: of[0] for name, of in result.figures.items()}
    assert [figures[n].most_work for n in ("none", "zigzag", "lpt")] == [56, 42, 36]
    assert figures["none"].imbalance == pytest.approx(20 / 36)
    assert [figures[n].most_rows for n in ("none", "zigzag", "lpt")] == [6, 6, 6]
    assert figures["zigzag"].rows_moved == 0
    assert figures["none"].rows_moved == 20 / 24  # the first and the last rank keep two rows
    for name, of in figures.items():
        assert of.rows_moved_matched <= of.rows_moved
        assert of.tile_imbalance == tile_imbalance(
            build_plan(fig5_batch().layout, 24, 4, strategy=name, chunks_per_rank=3)
        )
        assert of.planning_seconds > 0


def moved(plan, source):
    """Rows that are on another rank than before."""
    return sum(
        np.setdiff1d(plan.rows(rank), source.rows(rank)).size for rank in range(plan.cp_size)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_figures_by_definition(strategy):
    documents = [(33, [5, 9, 20, 30], 0), (18, [3, 17], 1), (13, [], 0)]
    layout, _ = layout_of(documents, block_size=3)
    batch = MicroBatch(layout, np.array([0, 33, 51, 64]))
    windows = (None, 6, 6)
    result = compare_strategies([batch], 4, [strategy], chunks_per_rank=4, windows=windows)
    (of,), plan = result.figures[strategy], result.plans[strategy]
    _, source = find_source(batch, 4, "zigzag")
    options = {"strategy": strategy, "chunks_per_rank": 4, "windows": windows}
    matched = build_plan(layout, 64, 4, source=source, **options)
    assert plan.digest == build_plan(layout, 64, 4, **options).digest
    assert result.sources == ["zigzag over the whole sequence"]
    assert of.rows_moved == moved(plan, source) / 64
    assert of.rows_moved_matched == moved(matched, source) / 64
    assert of.imbalance == plan.imbalance
    assert of.most_work == plan.work.max() / 3
    assert of.most_rows == max(plan.num_rows(rank) for rank in range(4))

    attended = np.zeros(4)
    for rank in range(4):
        rows, own = plan.rows(rank), np.isin(np.arange(plan.num_blocks), plan.blocks(rank))
        sees = visible(plan.layout, rows).any(axis=1)
        in_window = visible_in_window(plan.layout, rows, 6).reshape(plan.num_blocks, -1)
        attended[rank] = ((sees | own).sum() + 2 * (in_window.any(axis=1) | own).sum()) / 3
    # Chunks decide, not rows: a window may touch a chunk's other end only.
    assert attended.max() / plan.num_blocks <= of.queries <= 1
    for of_plan, share in ((plan, of.queries), (matched, of.queries_matched)):
        needed = [(of_plan.needs(w) | _own(of_plan)).sum(axis=1) for w in windows]
        assert share == pytest.approx(np.mean(needed, axis=0).max() / plan.num_blocks)


def test_chunks_fit_a_short_micro_batch_as_in_training():
    batch = fig5_batch()
    result = compare_strategies([batch], 4, ["lpt"], chunks_per_rank=100)
    fits = build_plan(batch.layout, 24, 4, strategy="lpt", chunks_per_rank=24 // 4)
    assert result.plans["lpt"].digest == fits.digest
    assert result.chunks_per_rank == 100


def test_tiles_are_priced_where_asked_for():
    layout, length = layout_of([(1000, list(range(10, 990, 7)), 0)], block_size=16)
    batch = MicroBatch(layout, np.array([0, length]))
    plans = {
        tiles: compare_strategies([batch], 4, ["lpt"], tiles=tiles).plans["lpt"]
        for tiles in (False, True)
    }
    for tiles, plan in plans.items():
        expected = build_plan(layout, length, 4, strategy="lpt", tiles=tiles)
        assert plan.digest == expected.digest
    assert plans[False].digest != plans[True].digest


def test_figures_that_would_take_too_long_are_left_out(monkeypatch):
    import megatron_splitkv.plan.comparison as comparison

    def figures():
        windows = (None, 6)
        result = compare_strategies([fig5_batch()], 4, ["lpt"], chunks_per_rank=3, windows=windows)
        return result.figures["lpt"][0], result.plans["lpt"]

    of, plan = figures()
    rows = 4 * plan.num_blocks * plan.block_size * 2  # two windows
    chunks_and_blocks = 4 * (12 + plan.num_blocks)
    for most in (rows, rows - 1, chunks_and_blocks, chunks_and_blocks - 1):
        monkeypatch.setattr(comparison, "_MOST_COUNTED", most)
        less, _ = figures()
        assert less.tile_imbalance == (of.tile_imbalance if most >= rows else None)
        assert less.queries == (of.queries if most >= chunks_and_blocks else None)
        assert less.imbalance == of.imbalance


def test_batches_are_asked_for_one_by_one():
    said = []

    def batches():
        for number in range(2):
            said.append(f"batch {number}")
            yield fig5_batch()

    compare_strategies(batches(), 4, ["none", "lpt"], one_more=lambda: said.append("."))
    assert said == ["batch 0", *"....", "batch 1", *"...."]


def _own(plan):
    return np.array([np.isin(np.arange(plan.num_blocks), plan.blocks(r)) for r in range(4)])


def test_means_and_worst_cases_over_micro_batches():
    other, length = layout_of([(16, [15], 0), (8, [7], 0)], block_size=2)
    batches = [fig5_batch(), MicroBatch(other, np.array([0, 16, 24]))]
    result = compare_strategies(batches, 4, ["none", "zigzag"], source="none")
    works = [build_plan(batch.layout, length, 4, strategy="none").work.max() for batch in batches]
    assert result.mean("none", "most_work") == np.mean(works)
    assert result.worst("none", "most_work") == max(works)
    assert result.mean("none", "rows_moved") is None
    assert result.worst("none", "rows_moved_matched") is None
    assert result.mean("none", "queries_matched") is None
    assert result.sources == ["on no rank: each reads its own"] * 2


def test_the_plans_are_those_of_the_first_micro_batch():
    batch = fig5_batch()
    other, _ = layout_of([(16, [15], 0), (8, [7], 0)], block_size=2)
    batches = [batch, MicroBatch(other, batch.cu_seqlens)]
    result = compare_strategies(batches, 4, ["lpt"], chunks_per_rank=3)
    expected = build_plan(batch.layout, 24, 4, strategy="lpt", chunks_per_rank=3)
    assert result.plans["lpt"].digest == expected.digest


@pytest.mark.parametrize(
    ("bounds", "kind", "words"),
    [
        ([0, 16, 24], "zigzag", "zigzag in every document"),
        ([0, 15, 24], "zigzag", "zigzag over the whole sequence"),
        ([0, 15, 20], "zigzag", "contiguous"),
        ([0, 15, 21], "zigzag", "on no rank: each reads its own (21 rows do not divide among 4 "
         "ranks)"),
        ([0, 16, 24], "contiguous", "contiguous"),
        ([0, 16, 24], "none", "on no rank: each reads its own"),
    ],
)  # fmt: skip
def test_where_the_rows_were(bounds, kind, words):
    layout, _ = layout_of([(20, [4], 0)], block_size=2)
    said, source = find_source(MicroBatch(layout, np.array(bounds)), 4, kind)
    assert said == words
    assert (source is None) == words.startswith("on no rank")
    if source is not None:
        assert source.context_length == bounds[-1]


def test_an_impossible_source_is_refused():
    layout, _ = layout_of([(21, [4], 0)], block_size=2)
    with pytest.raises(ConfigError, match="21 rows, no multiple of 4 "):
        find_source(MicroBatch(layout, np.array([0, 21])), 4, "contiguous")


def test_strategies_take_turns(monkeypatch):
    """One untimed plan of each, then rounds; a slow one is timed once."""
    import megatron_splitkv.plan.comparison as comparison

    order, now = [], [0.0]

    def plan(layout, length, cp_size, *, strategy, **options):
        order.append(strategy)
        now[0] += 2.0 if strategy == "lpt" else 0.001
        return strategy

    monkeypatch.setattr(comparison, "build_plan", plan)
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: now[0])
    layout, length = fig5_layout()
    result = time_strategies(layout, length, 4, ["none", "lpt", "zigzag"])
    assert order[:9] == [*["none", "lpt", "zigzag"] * 2, *["none", "zigzag"], "none"]
    assert {name: len(seconds) for name, (_, seconds) in result.items()} == {
        "none": 15,
        "lpt": 1,
        "zigzag": 15,
    }
    assert result["lpt"] == ("lpt", [pytest.approx(2)])
