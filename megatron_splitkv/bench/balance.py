"""What balance is worth in training steps: Appendix B of the paper, small, on gloo ranks.

Real steps of a small drafter, each rank a process. What a step costs is counted in CPU-seconds,
so that ranks may share cores: in every phase (plan, forward, backward) all wait for the slowest
rank, and a machine with a core for each rank would take the sum of those. A plan that is made
ahead, while the step before runs, costs the step nothing: its phase is left out.

Source:
    Appendix B of the Split-KV paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.bench.balance_step import PHASES, BalanceShape, prepare, step
from megatron_splitkv.bench.timing import Interval, bootstrap_ratio
from megatron_splitkv.testing.gloo import GlooPool

BASELINE = "none"
WAYS = ("ahead", "inside")  # where planning happens: before the step, or in it
_STRATEGIES = ("none", "zigzag", "lpt", "balanced", "hypergraph")
_STARTUP_SECONDS, _STEP_SECONDS = 180.0, 180.0


@dataclass(frozen=True, eq=False)
class BalanceRun:
    """Steps of one strategy on one number of ranks.

    Args:
        seconds: CPU-seconds, by repeat, rank and phase.
        wall: wall seconds of the slowest rank, by repeat.
        max_work: query-key pairs of the busiest rank, by repeat.
        imbalance: max / mean - 1 of the work, by repeat.

    Shape:
        seconds float64[repeats, P, 3]; the others float64[repeats].
    """

    seconds: NDArray[np.float64]
    wall: NDArray[np.float64]
    max_work: NDArray[np.float64]
    imbalance: NDArray[np.float64]

    def step_seconds(self, way: str) -> NDArray[np.float64]:
        """Seconds of a step with a core for each rank, by repeat.

        Args:
            way: one of `WAYS`.
        """
        slowest = self.seconds.max(axis=1)
        return slowest[:, PHASES.index("plan") + (way == "ahead") :].sum(axis=1)


@dataclass(frozen=True)
class BalanceBenchmark:
    """What was measured.

    Args:
        shape: what was trained.
        runs: by number of ranks and strategy.
    """

    shape: BalanceShape
    runs: dict[int, dict[str, BalanceRun]] = field(default_factory=dict)

    def speedup(self, cp_size: int, strategy: str, way: str) -> Interval:
        """Step time of `none` over that of a strategy, same draws of anchors."""
        of = self.runs[cp_size]
        return bootstrap_ratio(of[BASELINE].step_seconds("ahead"), of[strategy].step_seconds(way))

    def predicted(self, cp_size: int, strategy: str) -> float:
        """The same if a step were attention alone: ratio of the busiest ranks' works."""
        of = self.runs[cp_size]
        return float(of[BASELINE].max_work.sum() / of[strategy].max_work.sum())

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        return {
            "benchmark": "balance",
            "shape": asdict(self.shape),
            "ranks": {
                str(cp_size): {name: self._run_json(cp_size, name) for name in runs}
                for cp_size, runs in self.runs.items()
            },
        }

    def _run_json(self, cp_size: int, name: str) -> dict[str, Any]:
        run = self.runs[cp_size][name]
        return {
            "imbalance_percent": 100 * float(run.imbalance.mean()),
            "cpu_seconds_by_rank": {
                phase: run.seconds[:, :, i].mean(axis=0).tolist() for i, phase in enumerate(PHASES)
            },
            "step_seconds": {way: float(run.step_seconds(way).mean()) for way in WAYS},
            "wall_seconds": float(run.wall.mean()),
            "speedup": {way: asdict(self.speedup(cp_size, name, way)) for way in WAYS},
            "predicted_by_work": self.predicted(cp_size, name),
        }


def bench_balance(
    shape: BalanceShape, progress: Callable[[int, int], None] = lambda done, total: None
) -> BalanceBenchmark:
    """Train steps under every strategy that can run, in turn, on ranks of this machine.

    Every repeat draws new anchors, the same for all strategies; the first, untimed one warms up.

    Args:
        shape: what is trained.
        progress: called with (steps done, steps in all).

    Raises:
        RuntimeError: a rank failed.
        TimeoutError: a step hung.
    """
    strategies = [n for n in _STRATEGIES if n != "hypergraph" or find_spec("kahypar")]
    result = BalanceBenchmark(shape)
    total, done = len(shape.ranks) * len(strategies) * (shape.repeats + 1), 0
    progress(0, total)

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for cp_size in shape.ranks:
        pool = GlooPool(cp_size)
        try:
            pool.run(prepare, shape, timeout=_STARTUP_SECONDS)
            result.runs[cp_size] = _measure(pool, shape, strategies, one_more)
        finally:
            pool.close()
    return result


def _measure(
    pool: GlooPool,
    shape: BalanceShape,
    strategies: Sequence[str],
    one_more: Callable[[], None],
) -> dict[str, BalanceRun]:
    answers: dict[str, list[list[tuple[NDArray[np.float64], float]]]] = {}
    for repeat in range(shape.repeats + 1):
        for name in strategies[:: -1 if repeat % 2 else 1]:
            of_ranks = pool.run(step, shape, repeat, name, timeout=_STEP_SECONDS)
            if repeat:
                answers.setdefault(name, []).append(of_ranks)
            one_more()
    runs = {}
    for name in strategies:
        plans = [
            shape.plan(shape.layout(repeat), pool.world_size, name)
            for repeat in range(1, shape.repeats + 1)
        ]
        runs[name] = BalanceRun(
            seconds=np.array([[cpu for cpu, _ in of_ranks] for of_ranks in answers[name]]),
            wall=np.array([max(wall for _, wall in of_ranks) for of_ranks in answers[name]]),
            max_work=np.array([float(plan.work.max()) for plan in plans]),
            imbalance=np.array([plan.imbalance for plan in plans]),
        )
    return runs
