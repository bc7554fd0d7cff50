"""Strategies side by side on the same micro-batches: balance, memory, movement, planning time."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.planner import build_plan, fitting_chunks
from megatron_splitkv.plan.redistribution import rows_moved
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.tiles import tile_imbalance

Windows = tuple[int | None, ...]
# A planner is timed over so many runs, fewer where they take longer than this together.
_RUNS, _SECONDS = 15, 1.5
HYPERGRAPH_RANKS = 64
"""Up to here a plan of `hypergraph` takes about a second; of more ranks it takes minutes."""
# Figures that go through every rank's share of all blocks are left out of plans of more than this.
_MOST_COUNTED = 1 << 26
SOURCES = ("zigzag", "contiguous", "none")
NO_SOURCE = "on no rank: each reads its own"


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What a planner is given.

    Args:
        layout: the draft blocks.
        cu_seqlens: bounds of the packed documents; the last one is the context length.

    Shape:
        cu_seqlens int64[D + 1].
    """

    layout: BlockLayout
    cu_seqlens: NDArray[np.int64]

    @property
    def context_length(self) -> int:
        """S."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True)
class PlanFigures:
    """What a plan of one micro-batch is worth.

    Args:
        imbalance: of query-key pairs, max / mean - 1 over the ranks.
        tile_imbalance: the same, of the pairs in all kernel tiles that a rank computes; None where
            ranks times draft rows and different windows are too many to count.
        most_work: query-key pairs of the busiest rank, a mean over the layers.
        most_rows: context rows of the rank that has most.
        queries: share of all draft blocks that the rank with most of them attends if queries go
            only where keys are that they see; a mean over the layers. None where ranks times
            chunks and blocks are too many to count.
        queries_matched: the same after bundles were matched to ranks, which may take a document's
            keys away from the ranks that own its blocks; None without a source.
        rows_moved: share of the context rows that leave the rank where they were, bundles given to
            ranks as they come; None without a source.
        rows_moved_matched: the same after bundles were matched to ranks.
        planning_seconds: median of several plans; without matching.
    """

    imbalance: float
    tile_imbalance: float | None
    most_work: float
    most_rows: int
    queries: float | None
    queries_matched: float | None
    rows_moved: float | None
    rows_moved_matched: float | None
    planning_seconds: float


@dataclass(frozen=True)
class Comparison:
    """Figures of every strategy on every micro-batch, and the plans of the first.

    Args:
        cp_size: P.
        chunks_per_rank: J as it was asked for.
        windows: of the layers.
        tiles: whether chunks were priced by kernel tiles.
        context_lengths: S of every micro-batch.
        blocks: N of every micro-batch, without padding.
        sources: where the rows of every micro-batch were before, in words.
        figures: by strategy, one a micro-batch.
        plans: of the first micro-batch, by strategy, before matching.
    """

    cp_size: int
    chunks_per_rank: int | None
    windows: Windows
    tiles: bool = False
    context_lengths: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    figures: dict[str, list[PlanFigures]] = field(default_factory=dict)
    plans: dict[str, ContextPlan] = field(default_factory=dict)

    def mean(self, strategy: str, figure: str) -> float | None:
        """Mean over the micro-batches; None where there is none."""
        values = self._values(strategy, figure)
        return float(np.mean(values)) if values else None

    def worst(self, strategy: str, figure: str) -> float | None:
        """Largest over the micro-batches; None where there is none."""
        values = self._values(strategy, figure)
        return float(max(values)) if values else None

    def _values(self, strategy: str, figure: str) -> list[float]:
        values = (getattr(of_one, figure) for of_one in self.figures[strategy])
        return [value for value in values if value is not None]


def compare_strategies(
    batches: Iterable[MicroBatch],
    cp_size: int,
    strategies: Sequence[str],
    *,
    chunks_per_rank: int | None = None,
    windows: Windows = (None,),
    tiles: bool = False,
    source: str = "zigzag",
    one_more: Callable[[], None] = lambda: None,
) -> Comparison:
    """Plan every micro-batch under every strategy.

    Args:
        batches: what to plan; one after the other is asked for.
        cp_size: P.
        strategies: names for `build_plan`.
        chunks_per_rank: as there, or as many as a shorter micro-batch allows, as in training.
        windows: as there.
        tiles: as there.
        source: one of `SOURCES`, see `find_source`.
        one_more: called twice a micro-batch and strategy: when it has planned, and when its plan
            has been counted through.

    Raises:
        ConfigError: what `build_plan` and `find_source` refuse.
    """
    if cp_size < 1:
        raise ConfigError(f"cp_size {cp_size} must be at least 1")
    result = Comparison(cp_size, chunks_per_rank, windows, tiles)
    for batch in batches:
        where, rows_from = find_source(batch, cp_size, source)
        result.context_lengths.append(batch.context_length)
        result.blocks.append(int(batch.layout.block_keep_mask.sum()))
        result.sources.append(where)
        workload = (batch.layout, batch.context_length, cp_size)
        options: dict[str, Any] = {
            "chunks_per_rank": fitting_chunks(chunks_per_rank, batch.context_length, cp_size),
            "windows": windows,
            "tiles": tiles,
        }
        timed = time_strategies(*workload, strategies, one_more=one_more, **options)
        for strategy, (plan, seconds) in timed.items():
            matched = plan
            if rows_from is not None:
                matched = build_plan(*workload, strategy=strategy, source=rows_from, **options)
            figures = _figures(plan, matched, rows_from, float(np.median(seconds)))
            result.figures.setdefault(strategy, []).append(figures)
            result.plans.setdefault(strategy, plan)
            one_more()
    return result


def time_strategies(
    layout: BlockLayout,
    context_length: int,
    cp_size: int,
    strategies: Sequence[str],
    *,
    one_more: Callable[[], None] = lambda: None,
    **options: Any,
) -> dict[str, tuple[ContextPlan, list[float]]]:
    """Plan with each strategy several times, after an untimed one.

    Strategies take turns, so that what slows the machine slows all of them. One that needs seconds
    for a plan is timed less often, but at least once.

    Args:
        layout: the blocks.
        context_length: S.
        cp_size: P.
        strategies: names for `build_plan`.
        one_more: called when a strategy has made its untimed plan.
        **options: of `build_plan`.

    Returns:
        By strategy: the plan, and the wall seconds of every timed one.
    """

    def once(strategy: str) -> tuple[ContextPlan, float]:
        return timed_plan(layout, context_length, cp_size, strategy, **options)

    first = {}
    for strategy in strategies:
        first[strategy] = once(strategy)
        one_more()
    seconds: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for run in range(_RUNS):
        for strategy, (_, untimed) in first.items():
            if run == 0 or untimed * (run + 2) < _SECONDS:
                seconds[strategy].append(once(strategy)[1])
    return {strategy: (plan, seconds[strategy]) for strategy, (plan, _) in first.items()}


def timed_plan(
    layout: BlockLayout, context_length: int, cp_size: int, strategy: str, **options: Any
) -> tuple[ContextPlan, float]:
    """`build_plan`, and the wall seconds that it took, pricing included."""
    begin = time.perf_counter()
    plan = build_plan(layout, context_length, cp_size, strategy=strategy, **options)
    return plan, time.perf_counter() - begin


def find_source(batch: MicroBatch, cp_size: int, kind: str) -> tuple[str, RowSource | None]:
    """Where a micro-batch's rows are before a plan moves them.

    Args:
        batch: the micro-batch.
        cp_size: P.
        kind: `zigzag` is Megatron's placement: in every document if all lengths are multiples of
            2 P, else over the whole sequence if that is one, else P equal parts, else none.
            `contiguous` is P equal parts; `none` is no placement: every rank reads its own rows.

    Returns:
        The place in words, and as a source.

    Raises:
        ConfigError: `contiguous` is asked for and the context does not divide.
    """
    length, parts = batch.context_length, 2 * cp_size
    if kind == "zigzag" and not (np.diff(batch.cu_seqlens) % parts).any():
        return "zigzag in every document", RowSource.zigzag_documents(batch.cu_seqlens, cp_size)
    if kind == "zigzag" and length % parts == 0:
        return "zigzag over the whole sequence", RowSource.zigzag(length, cp_size)
    if kind == "contiguous" or (kind == "zigzag" and length % cp_size == 0):
        return "contiguous", RowSource.contiguous(length, cp_size)
    why = f" ({length:,} rows do not divide among {cp_size} ranks)"
    return NO_SOURCE + (why if kind == "zigzag" else ""), None


def _figures(
    plan: ContextPlan, matched: ContextPlan, source: RowSource | None, seconds: float
) -> PlanFigures:
    def moved(of: ContextPlan) -> float | None:
        return None if source is None else rows_moved(of, source) / max(1, of.context_length)

    rows = np.zeros(plan.cp_size, dtype=np.int64)
    np.add.at(rows, plan.chunk_owner, np.diff(plan.chunk_bounds))
    draft_rows = plan.cp_size * plan.num_blocks * plan.block_size * len(set(plan.windows))
    return PlanFigures(
        imbalance=plan.imbalance,
        tile_imbalance=tile_imbalance(plan) if draft_rows <= _MOST_COUNTED else None,
        most_work=int(plan.work.max()) / len(plan.windows),
        most_rows=int(rows.max()),
        queries=_attended_share(plan),
        queries_matched=None if source is None else _attended_share(matched),
        rows_moved=moved(plan),
        rows_moved_matched=moved(matched),
        planning_seconds=seconds,
    )


def _attended_share(plan: ContextPlan) -> float | None:
    """Blocks that the rank with most of them attends, its own included, over all blocks."""
    if plan.cp_size * (plan.chunk_owner.size + plan.num_blocks) > _MOST_COUNTED:
        return None
    if plan.num_blocks == 0:
        return 0.0
    owner = np.arange(plan.num_blocks) // (plan.num_blocks // plan.cp_size)
    own = owner == np.arange(plan.cp_size)[:, None]
    attended = sum((plan.needs(w) | own).sum(axis=1) for w in plan.windows) / len(plan.windows)
    return float(np.max(attended) / plan.num_blocks)
