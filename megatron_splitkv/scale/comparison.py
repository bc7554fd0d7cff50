"""Predictions beside the paper's bars: the error of each, the the order, what the errors hang on.

Bars at P = 8 calibrated the constants; only the others are held out and count as evidence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from statistics import mean

from megatron_splitkv.comm.links import Links
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale.constants import Constants
from megatron_splitkv.scale.methods import METHODS
from megatron_splitkv.scale.paper import Bar, all_bars
from megatron_splitkv.scale.step import StepTime, step_seconds

STEP = 0.2  # by which the sensitivity moves a constant


@dataclass(frozen=True)
class Prediction:
    """A bar and what the model says."""

    bar: Bar
    modelled: StepTime

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.modelled.total / self.bar.seconds - 1

    @property
    def held_out(self) -> bool:
        """Whether the constants never saw the bar."""
        return not self.bar.calibrates


def predict(
    links: Links, constants: Constants, bars: Iterable[Bar] | None = None
) -> list[Prediction]:
    """Predict bars.

    Args:
        links: the machine, its speeds of computation included.
        constants: the fitted ones.
        bars: the paper's when None.
    """
    return [
        Prediction(
            bar,
            step_seconds(
                METHODS[bar.method],
                bar.workload,
                DFlashConfig.preset(bar.model),
                links,
                constants,
            ),
        )
        for bar in (all_bars() if bars is None else bars)
    ]


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of several bars.

    Args:
        bars: how many.
        mean: of the absolute errors.
        worst: the largest error in size, with its sign.
        within_15: how many bars err by at most 15 %.
    """

    bars: int
    mean: float
    worst: float
    within_15: int


def summarise(predictions: Sequence[Prediction]) -> ErrorSummary:
    """Summary of the errors of at least one bar."""
    errors = [prediction.error for prediction in predictions]
    return ErrorSummary(
        bars=len(errors),
        mean=mean(map(abs, errors)),
        worst=max(errors, key=abs),
        within_15=sum(abs(error) <= 0.15 for error in errors),
    )


def error_table(predictions: Sequence[Prediction]) -> dict[tuple[str, str], ErrorSummary]:
    """Held-out errors by method and setting; setting ``all`` is every setting together."""
    held_out = [prediction for prediction in predictions if prediction.held_out]
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in held_out:
        for setting in (prediction.bar.setting, "all"):
            groups.setdefault((prediction.bar.method, setting), []).append(prediction)
    return {key: summarise(group) for key, group in groups.items()}


@dataclass(frozen=True)
class OrderSummary:
    """Whether the model ranks methods as the paper measured them, over held-out places.

    Args:
        places: combinations of setting, drafter and point.
        exact: places at which all methods stand in the measured order.
        pairs: pairs of methods over all places.
        right: pairs in the measured order.
        fastest: places at which the fastest method is the measured one.
        wrong: what came out the wrong way round, one line a pair.
    """

    places: int
    exact: int
    pairs: int
    right: int
    fastest: int
    wrong: tuple[str, ...]


def order_of_methods(predictions: Sequence[Prediction]) -> OrderSummary:
    """Compare orders place by place; a tie of the paper is right either way."""
    places: dict[tuple[str, str, int], list[Prediction]] = {}
    for p in predictions:
        if p.held_out:
            places.setdefault((p.bar.setting, p.bar.model, p.bar.x), []).append(p)
    pairs = right = exact = fastest = 0
    wrong: list[str] = []
    for (setting, model, x), group in places.items():
        before = len(wrong)
        for a, b in combinations(sorted(group, key=lambda p: p.bar.seconds), 2):
            pairs += 1
            if a.bar.seconds == b.bar.seconds or a.modelled.total < b.modelled.total:
                right += 1
            else:
                wrong.append(
                    f"{setting} {model} at {x}: {a.bar.method} {a.bar.seconds:.2f} < "
                    f"{b.bar.method} {b.bar.seconds:.2f} s measured, "
                    f"{a.modelled.total:.2f} > {b.modelled.total:.2f} s modelled"
                )
        exact += len(wrong) == before
        best = min(group, key=lambda p: p.modelled.total)
        fastest += best.bar.seconds == min(p.bar.seconds for p in group)
    return OrderSummary(len(places), exact, pairs, right, fastest, tuple(wrong))


def sensitivity(
    links: Links, constants: Constants, bars: Sequence[Bar]
) -> dict[str, tuple[float, float, float]]:
    """Mean absolute held-out errors when one number is a fifth smaller or larger.

    Args:
        links: the machine without the fitted speeds.
        constants: the fitted ones.
        bars: of the paper; Split-KV's among them.

    Returns:
        By the number that was moved: (its factor, error of Split-KV's bars, error of all bars).
    """
    errors: dict[str, tuple[float, float, float]] = {}

    def note(name: str, factor: float, machine: Links, moved: Constants) -> None:
        held_out = [p for p in predict(moved.on(machine), moved, bars) if p.held_out]
        own = [p for p in held_out if p.bar.method == "splitkv"]
        errors[name] = (factor, summarise(own).mean, summarise(held_out).mean)

    note("as fitted", 1.0, links, constants)
    for factor in (1 - STEP, 1 + STEP):
        for field in fields(Constants):
            moved = replace(constants, **{field.name: factor * getattr(constants, field.name)})
            note(f"{field.name} x {factor:.1f}", factor, links, moved)
        for name in ("nic_bandwidth", "intra_bandwidth"):
            machine = replace(links, **{name: factor * getattr(links, name)})
            note(f"{name} x {factor:.1f}", factor, machine, constants)
    return errors
