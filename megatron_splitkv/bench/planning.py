"""How even plans are and how long they take: Figures 9 and 10 of the paper on this machine.

Four samples a micro-batch, a quarter of each without supervision, 512 anchors a sample, 16 slots a
block; contexts of 16k to 256k a sample on 8 ranks, and 8 to 64 ranks at 256k. All strategies plan
the same draws of anchors in the same process with the same number of chunks a rank, and take turns.

Source:
    Section 5.5 of the Split-KV paper (workload, and the numbers in `PAPER_IMBALANCE` and
    `PAPER_MILLISECONDS`, which the authors measured on a machine of theirs).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.comparison import HYPERGRAPH_RANKS, timed_plan

SAMPLES, PROMPT_FRACTION, ANCHORS, BLOCK_SIZE = 4, 0.25, 512, 16
_HYPERGRAPH_SEEDS = 3  # it takes a second a plan at 64 ranks
_REPEATS = 3  # timed plans of a draw
_SCALING_ROWS = 1 << 16  # context rows a rank while ranks grow: 64M rows on 1024
_SCALING_REPEATS = 7
# What is planned within minutes and a few gigabytes.
_MOST_ROWS = 1 << 26  # of a micro-batch
_MOST_RANKS = 4096
_MOST_CHUNKS = 1 << 20

# Mean imbalance in percent over the contexts on 8 ranks, and over the ranks at 256k.
PAPER_IMBALANCE = {
    "none": (46.49, 55.26),
    "zigzag": (7.94, 8.01),
    "lpt": (0.38, 0.21),
    "hypergraph": (0.66, 0.80),
}
# Ranges of planning milliseconds likewise, where the text tells the studies apart; never set
# against times of this machine.
PAPER_MILLISECONDS = {
    "zigzag": ((0.01, 0.05), (0.01, 0.05)),
    "lpt": ((0.38, 1.24), (0.38, 1.24)),
    "hypergraph": ((16.92, 148.7), (148.38, 1164.64)),
}


@dataclass(frozen=True)
class PlanningShape:
    """What is planned.

    Args:
        contexts: tokens a sample, ascending; planned for the first of `ranks`.
        ranks: P, ascending; planned at the last of `contexts`.
        chunks_per_rank: J of every strategy that has one.
        seeds: draws of anchors.
        scale_to: largest P of the growth of planning time.
    """

    contexts: tuple[int, ...] = (1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18)
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    chunks_per_rank: int = 16
    seeds: int = 20
    scale_to: int = 1024

    def __post_init__(self) -> None:
        for name in ("chunks_per_rank", "seeds", "scale_to"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("contexts", "ranks"):
            values = getattr(self, name)
            if not values or min(values) < 1 or list(values) != sorted(set(values)):
                raise ConfigError(f"{name} {list(values)} must ascend and be at least 1")
        for name, value, most in (
            ("contexts", self.contexts[-1], _MOST_ROWS // SAMPLES),
            ("ranks", self.ranks[-1], _MOST_RANKS),
            ("scale_to", self.scale_to, _MOST_RANKS),
        ):
            if value > most:
                raise ConfigError(f"{name}: {value:,} must be at most {most:,}")
        for context, ranks in self.points:
            most = min(SAMPLES * context, _MOST_CHUNKS) // ranks
            if self.chunks_per_rank > most:
                raise ConfigError(
                    f"chunks_per_rank {self.chunks_per_rank} must be at most {most:,} for "
                    f"{SAMPLES} samples of {context:,} tokens on {ranks:,} ranks; take fewer "
                    "chunks or ranks, or longer contexts"
                )

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those that can run in time, in the order of the tables."""
        runs = self.ranks[-1] <= HYPERGRAPH_RANKS and find_spec("kahypar") is not None
        return tuple(name for name in PLAN_STRATEGIES if runs or name != "hypergraph")

    @property
    def points(self) -> list[tuple[int, int]]:
        """(tokens a sample, P) of both studies; they share the last context on the first ranks."""
        by_context = [(context, self.ranks[0]) for context in self.contexts]
        return by_context + [(self.contexts[-1], ranks) for ranks in self.ranks[1:]]

    @property
    def studies(self) -> dict[str, list[int]]:
        """Which of `points` belong to the growth of contexts, and to that of ranks."""
        shared = len(self.contexts) - 1
        return {
            "contexts": list(range(shared + 1)),
            "ranks": list(range(shared, shared + len(self.ranks))),
        }

    @property
    def scaling_ranks(self) -> list[int]:
        """P of the growth of planning time: powers of four down from the largest."""
        steps = (self.scale_to.bit_length() - 1) // 2
        return [self.scale_to // 4**i for i in range(min(steps, 4), -1, -1)]


@dataclass(frozen=True, eq=False)
class PlanningPoint:
    """One context and number of ranks.

    Args:
        context: tokens a sample.
        cp_size: P.
        imbalance: max / mean - 1 of every draw, by strategy.
        seconds: of every timed plan, by strategy.

    Shape:
        imbalance float64[seeds], seconds float64[seeds * repeats]; fewer seeds for `hypergraph`.
    """

    context: int
    cp_size: int
    imbalance: dict[str, NDArray[np.float64]]
    seconds: dict[str, NDArray[np.float64]]

    def milliseconds(self, strategy: str) -> float:
        """Median over draws and repeats."""
        return 1e3 * float(np.median(self.seconds[strategy]))


@dataclass(frozen=True)
class ScalingPoint:
    """Planning time of `balanced` for one number of ranks, chunks by rule.

    Args:
        cp_size: P.
        context_length: S.
        blocks: N.
        chunks: P * J.
        milliseconds: median.
    """

    cp_size: int
    context_length: int
    blocks: int
    chunks: int
    milliseconds: float

    @property
    def nanoseconds_per_step(self) -> float:
        """Time over (N + PJ) log2(N + PJ): constant or falling if growth is as it should be."""
        items = self.blocks + self.chunks
        return 1e6 * self.milliseconds / (items * math.log2(items))


@dataclass(frozen=True)
class PlanningBenchmark:
    """What was measured.

    Args:
        shape: what was planned.
        strategies: in the order of the tables.
        points: of `shape.points`.
        scaling: growth of planning time.
    """

    shape: PlanningShape
    strategies: tuple[str, ...]
    points: list[PlanningPoint] = field(default_factory=list)
    scaling: list[ScalingPoint] = field(default_factory=list)

    def study(self, name: str) -> list[PlanningPoint]:
        """Points of one study."""
        return [self.points[i] for i in self.shape.studies[name]]

    def study_mean(self, name: str, strategy: str) -> float:
        """Imbalance in percent, a mean over draws and then over the study's points."""
        return 100 * float(np.mean([p.imbalance[strategy].mean() for p in self.study(name)]))

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        return {
            "benchmark": "plan",
            "shape": asdict(self.shape),
            "points": [
                {
                    "context": point.context,
                    "cp_size": point.cp_size,
                    "strategies": {
                        strategy: {
                            "seeds": len(point.imbalance[strategy]),
                            "imbalance_percent": _summary(100 * point.imbalance[strategy]),
                            "planning_ms": point.milliseconds(strategy),
                        }
                        for strategy in self.strategies
                    },
                }
                for point in self.points
            ],
            "mean_imbalance_percent": {
                study: {s: self.study_mean(study, s) for s in self.strategies}
                for study in self.shape.studies
            },
            "scaling": [
                asdict(point) | {"ns_per_item_and_log2": point.nanoseconds_per_step}
                for point in self.scaling
            ],
            "paper": {
                "measured": "by its authors, on another machine",
                "mean_imbalance_percent": {
                    study: {name: means[i] for name, means in PAPER_IMBALANCE.items()}
                    for i, study in enumerate(self.shape.studies)
                },
                "planning_ms_range": {
                    study: {name: list(ranges[i]) for name, ranges in PAPER_MILLISECONDS.items()}
                    for i, study in enumerate(self.shape.studies)
                },
            },
        }


def bench_planning(
    shape: PlanningShape, progress: Callable[[int, int], None] = lambda done, total: None
) -> PlanningBenchmark:
    """Plan every point for every seed under every strategy that can run in time.

    Args:
        shape: what to plan.
        progress: called with (draws done, draws in all).
    """
    strategies = shape.strategies
    result = PlanningBenchmark(shape, strategies)
    total, done = len(shape.points) * shape.seeds + len(shape.scaling_ranks), 0

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(0, total)
    for strategy in strategies:  # untimed: first calls are slow
        build_plan(*draw_samples(SAMPLES, shape.contexts[0], 0), shape.ranks[0], strategy=strategy)
    for context, cp_size in shape.points:
        result.points.append(_measure(shape, context, cp_size, strategies, one_more))
    for cp_size in shape.scaling_ranks:
        result.scaling.append(_measure_scaling(cp_size))
        one_more()
    return result


def draw_samples(samples: int, context: int, seed: int) -> tuple[BlockLayout, int]:
    """Blocks of the paper's workload.

    Args:
        samples: packed documents.
        context: tokens of each.
        seed: of the anchors.

    Returns:
        The blocks and the context length S.
    """
    loss_mask = np.tile(np.arange(context) >= int(context * PROMPT_FRACTION), samples)
    layout = select_anchors(
        loss_mask,
        np.arange(samples + 1) * context,
        num_anchors=ANCHORS,
        block_size=BLOCK_SIZE,
        seed=seed,
        step=0,
        sample_ids=np.arange(samples),
    )
    return layout.without_padding(), samples * context


def _measure(
    shape: PlanningShape,
    context: int,
    cp_size: int,
    strategies: Sequence[str],
    one_more: Callable[[], None],
) -> PlanningPoint:
    imbalance: dict[str, list[float]] = {name: [] for name in strategies}
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    for seed in range(shape.seeds):
        workload = draw_samples(SAMPLES, context, seed)
        take_part = [n for n in strategies if n != "hypergraph" or seed < _HYPERGRAPH_SEEDS]
        for repeat in range(_REPEATS):
            # Every second time in the opposite order, so that nobody always follows the slowest.
            for name in take_part[:: -1 if (seed + repeat) % 2 else 1]:
                if name == "hypergraph" and repeat:
                    continue
                plan, taken = timed_plan(
                    *workload, cp_size, name, chunks_per_rank=shape.chunks_per_rank
                )
                seconds[name].append(taken)
                if repeat == 0:
                    imbalance[name].append(plan.imbalance)
        one_more()
    return PlanningPoint(
        context,
        cp_size,
        {name: np.array(values) for name, values in imbalance.items()},
        {name: np.array(values) for name, values in seconds.items()},
    )


def _measure_scaling(cp_size: int) -> ScalingPoint:
    context_length = cp_size * _SCALING_ROWS
    sample = min(1 << 18, context_length)
    layout, context_length = draw_samples(context_length // sample, sample, 0)
    timed = [
        timed_plan(layout, context_length, cp_size, "balanced")
        for _ in range(_SCALING_REPEATS + 1)  # the first is not counted
    ]
    return ScalingPoint(
        cp_size,
        context_length,
        layout.num_blocks,
        timed[0][0].chunk_owner.size,
        1e3 * float(np.median([seconds for _, seconds in timed[1:]])),
    )


def _summary(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std()), "worst": float(values.max())}
