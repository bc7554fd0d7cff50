"""Every strategy's step side by side: bytes, calls, memory, balance and time, in one run."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.bench.ranks import Ranks, open_ranks
from megatron_splitkv.bench.step_auto import AutoChoice, choose_auto
from megatron_splitkv.bench.step_kernel import call_seconds, kernel_flops
from megatron_splitkv.bench.step_rank import RankStep, inspect_step, prepare, run_step
from megatron_splitkv.bench.step_shape import (
    PAPER_PLACES,
    SPLITKV,
    Method,
    StepShape,
    imbalance,
)
from megatron_splitkv.bench.step_time import PARTS, Injection, passed_times
from megatron_splitkv.bench.timing import Spread
from megatron_splitkv.comm.links import Links
from megatron_splitkv.config import ConfigError
from megatron_splitkv.testing import relative_error


@dataclass(frozen=True, eq=False)
class MethodRun:
    """What one method took.

    Args:
        method: which.
        attention: seconds of attention and its communication, by repeat and `PARTS`.
        whole: the same of the whole layer, context projections included.
        cpu_seconds: by repeat and rank.
        bytes: sent by each rank.
        formula_bytes: the same by `attention.strategies.volumes`.
        calls: collectives.
        formula_calls: by the formula.
        peak_bytes: of live tensors, by rank.
        imbalance: of the attention's work, see `step_shape.imbalance`.
        difference: of the output, relative to split-KV's.

    Shape:
        attention, whole float64[repeats, 3]; cpu_seconds float64[repeats, P].
    """

    method: Method
    attention: NDArray[np.float64]
    whole: NDArray[np.float64]
    cpu_seconds: NDArray[np.float64]
    bytes: list[float]
    formula_bytes: list[float]
    calls: int
    formula_calls: int
    peak_bytes: list[int]
    imbalance: float
    difference: float

    def seconds(self, *, whole: bool = False) -> NDArray[np.float64]:
        """Of every repeat."""
        return (self.whole if whole else self.attention).sum(axis=1)

    @property
    def as_formula(self) -> bool:
        """Whether bytes and calls are those of the formula."""
        return self.calls == self.formula_calls and self.bytes == self.formula_bytes

    def to_json(self, ours: "MethodRun") -> dict[str, Any]:
        """Everything as numbers.

        Args:
            ours: whose times the ratios are over.
        """
        return {
            "strategy": self.method.strategy,
            "plan": self.method.plan,
            "block_order": self.method.block_order,
            "offered_by_a_launch": self.method.offered,
            "bytes_by_rank": self.bytes,
            "formula_bytes_by_rank": self.formula_bytes,
            "calls": self.calls,
            "formula_calls": self.formula_calls,
            "as_formula": self.as_formula,
            "peak_bytes_by_rank": self.peak_bytes,
            "imbalance_percent": 100 * self.imbalance,
            "cpu_seconds_by_rank": self.cpu_seconds.mean(axis=0).tolist(),
            "attention_and_communication_seconds": asdict(Spread.of(self.seconds())),
            "parts_seconds": dict(
                zip(PARTS, np.median(self.attention, axis=0).tolist(), strict=True)
            ),
            "layer_seconds": asdict(Spread.of(self.seconds(whole=True))),
            "over_splitkv": asdict(Spread.of(self.seconds() / ours.seconds())),
            "layer_over_splitkv": asdict(
                Spread.of(self.seconds(whole=True) / ours.seconds(whole=True))
            ),
            "output_difference": self.difference,
        }


@dataclass(frozen=True, eq=False)
class StepPoint:
    """All methods on one shape and number of ranks.

    Args:
        shape: the layer and its micro-batch.
        cp_size: P.
        injection: None where times are those that passed.
        runs: by name; split-KV at its best place by an untimed step comes first, then at the
            paper's and at the places that `auto` would choose, then the peers.
        auto: what ``--cp-comm-type auto`` would choose.
    """

    shape: StepShape
    cp_size: int
    injection: Injection | None
    runs: dict[str, MethodRun]
    auto: AutoChoice

    @property
    def fastest_offered(self) -> MethodRun:
        """The quickest method that a launch can have."""
        offered = [run for run in self.runs.values() if run.method.offered]
        return min(offered, key=lambda run: float(np.median(run.seconds())))

    def auto_over_best(self, *, whole: bool = False) -> Spread:
        """Time of what `auto` would choose over the best that a launch can have."""
        offered = [run for run in self.runs.values() if run.method.offered]
        best = min(offered, key=lambda run: float(np.median(run.seconds(whole=whole))))
        chosen = self.runs[self.auto.method.name]
        return Spread.of(chosen.seconds(whole=whole) / best.seconds(whole=whole))

    @property
    def ours(self) -> MethodRun:
        """Split-KV at its best place."""
        return next(iter(self.runs.values()))

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        injection = self.injection
        return {
            "shape": asdict(self.shape),
            "cp_size": self.cp_size,
            "splitkv": self.ours.method.name,
            "links": None if injection is None else asdict(injection.links),
            "core_flops": None if injection is None else injection.core_flops,
            "slowdown": None if injection is None else injection.slowdown,
            "auto": {
                "method": self.auto.method.name,
                "reason": self.auto.choice.reason,
                "estimated_seconds": dict(self.auto.choice.seconds),
                "best_offered": self.fastest_offered.method.name,
                "over_best": asdict(self.auto_over_best()),
                "layer_over_best": asdict(self.auto_over_best(whole=True)),
            },
            "methods": {name: run.to_json(self.ours) for name, run in self.runs.items()},
        }


@dataclass(frozen=True)
class StepBenchmark:
    """All points of a run."""

    repeats: int
    points: list[StepPoint] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        return {
            "benchmark": "step",
            "torch": torch.__version__,
            "repeats": self.repeats,
            "points": [point.to_json() for point in self.points],
        }


def bench_step(
    shapes: Sequence[StepShape],
    *,
    ranks: Sequence[int] = (4,),
    links: Links | None,
    warmups: int = 1,
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StepBenchmark:
    """Run every method on every shape and number of ranks, in turn.

    Args:
        shapes: layers and micro-batches.
        ranks: numbers of ranks; the launcher's, where one has started this process.
        links: of the machine whose time is wanted; None for the time that passes.
        warmups: untimed steps of each method.
        repeats: timed steps of each method.
        progress: called with (steps done, steps in all).

    Raises:
        ConfigError: too few of something, or another number of ranks than were launched.
    """
    check_effort(shapes, ranks, warmups, repeats)
    counts = [len(shape.methods(cp_size)) for cp_size in ranks for shape in shapes]
    total, done = sum(counts) * (1 + warmups + repeats), 0
    progress(0, total)

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    result = StepBenchmark(repeats)
    for cp_size in ranks:
        group = open_ranks(cp_size)
        try:
            for shape in shapes:
                group.run(prepare, shape)
                measurement = _Measurement(group, shape, links, one_more)
                result.points.append(measurement.run(warmups, repeats))
        finally:
            group.close()
    return result


def check_effort(
    shapes: Sequence[StepShape], ranks: Sequence[int], warmups: int, repeats: int
) -> None:
    """Refuse what `bench_step` cannot run, before anything is started.

    Args:
        shapes: layers and micro-batches.
        ranks: numbers of ranks.
        warmups: untimed steps of each method.
        repeats: timed steps of each method.

    Raises:
        ConfigError: too few of something.
    """
    if repeats < 1 or warmups < 1:
        raise ConfigError(f"repeats {repeats} and warmups {warmups} must be at least 1")
    if not ranks or min(ranks) < 2:
        raise ConfigError(f"ranks {list(ranks)} must be at least 2: alone nothing is sent")
    for cp_size in ranks:
        for shape in shapes:
            _check_rows(shape, cp_size)


def _check_rows(shape: StepShape, cp_size: int) -> None:
    if shape.context // shape.samples < 2 * cp_size or shape.layout.num_blocks < cp_size:
        raise ConfigError(
            f"{shape.context} context rows and {shape.layout.num_blocks} blocks are too few for "
            f"{cp_size} ranks"
        )


class _Measurement:
    """One point while it is measured."""

    def __init__(
        self, group: Ranks, shape: StepShape, links: Links | None, one_more: Callable[[], None]
    ) -> None:
        self.group = group
        self.shape = shape
        self.one_more = one_more
        self.methods = list(shape.methods(group.world_size))
        self.plans = {m: shape.plan(m, group.world_size) for m in self.methods}
        self.injection = None
        if links is not None:
            flops = float(np.median(group.run(kernel_flops, shape, SPLITKV[0])))
            call = float(np.median(group.run(call_seconds, shape)))
            self.injection = Injection(links, flops, shape, call)

    def run(self, warmups: int, repeats: int) -> StepPoint:
        inspected = {m: self._inspect(m) for m in self.methods}
        warm = [{m: self._step(m) for m in self.methods} for _ in range(warmups)]
        best = min(SPLITKV, key=lambda m: self._cost_of_place(m, warm[-1][m]))
        auto = choose_auto(self.shape, self.group.world_size, self.injection, self.methods)
        kept = [best] + [m for m in SPLITKV if m != best and m in (PAPER_PLACES, auto.method)]
        kept += [m for m in self.methods if m.strategy != "splitkv"]
        for _ in range(repeats * (len(self.methods) - len(kept))):
            self.one_more()
        steps: dict[Method, list[list[RankStep]]] = {m: [] for m in kept}
        for repeat in range(repeats):
            for method in kept[:: -1 if repeat % 2 else 1]:
                steps[method].append(self._step(method))
        reference = inspected[best][1]
        runs = {m.name: self._summary(m, steps[m], inspected[m], reference) for m in kept}
        return StepPoint(self.shape, self.group.world_size, self.injection, runs, auto)

    def _step(self, method: Method) -> list[RankStep]:
        steps = self.group.run(run_step, self.shape, method, self.injection is None)
        self.one_more()
        return steps

    def _inspect(self, method: Method) -> tuple[list[int], torch.Tensor]:
        """Peak bytes by rank, and the output of all ranks in the order of the anchors."""
        peaks, outs = zip(*self.group.run(inspect_step, self.shape, method), strict=True)
        self.one_more()
        layout = self.plans[method].layout
        rows = torch.from_numpy(np.concatenate(outs))
        kept = np.flatnonzero(layout.block_keep_mask)
        order = kept[np.argsort(layout.anchor_positions[kept])]
        blocks = rows.unflatten(0, (-1, layout.block_size))
        return list(peaks), blocks[torch.from_numpy(order)]

    def _times(
        self, method: Method, steps: Sequence[RankStep], *, whole: bool
    ) -> NDArray[np.float64]:
        if self.injection is None:
            return passed_times(steps, whole=whole)
        return self.injection.times(steps, method, self.plans[method], whole=whole)

    def _cost_of_place(self, method: Method, steps: Sequence[RankStep]) -> float:
        """What differs between split-KV's places, but for the noise of computation."""
        times = self._times(method, steps, whole=False)
        if self.injection is None:
            return float(times.sum())
        return float(times[-1]) + self.injection.repeated_seconds(method, self.plans[method])

    def _summary(
        self,
        method: Method,
        steps: list[list[RankStep]],
        inspected: tuple[list[int], torch.Tensor],
        reference: torch.Tensor,
    ) -> MethodRun:
        plan = self.plans[method]
        volumes = [self.shape.volume(method, plan, rank) for rank in range(plan.cp_size)]
        return MethodRun(
            method=method,
            attention=np.array([self._times(method, s, whole=False) for s in steps]),
            whole=np.array([self._times(method, s, whole=True) for s in steps]),
            cpu_seconds=np.array([[rank.cpu_seconds for rank in s] for s in steps]),
            bytes=[rank.bytes for rank in steps[0]],
            formula_bytes=[v.bytes for v in volumes],
            calls=steps[0][0].calls,
            formula_calls=volumes[0].forward.calls + volumes[0].backward.calls,
            peak_bytes=inspected[0],
            imbalance=imbalance(method, plan),
            difference=relative_error(inspected[1], reference),
        )
