"""Everything that `splitkv scale` shows, computed once; tables, pictures and JSON read it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from megatron_splitkv.comm.links import Links
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale.beyond import Cell, explore
from megatron_splitkv.scale.comparison import (
    OrderSummary,
    Prediction,
    error_table,
    order_of_methods,
    predict,
    sensitivity,
)
from megatron_splitkv.scale.constants import FITTED, READINGS, Constants
from megatron_splitkv.scale.methods import OUR_METHODS
from megatron_splitkv.scale.paper import MODELS, SETTINGS, all_bars, points_of, workload_of
from megatron_splitkv.scale.step import step_seconds

BEYOND = "beyond"


@dataclass(frozen=True)
class Machine:
    """Where steps run.

    Args:
        label: what tables call it.
        links: speeds of computation included.
        is_paper: whether the paper's bars were measured on such a machine.
    """

    label: str
    links: Links
    is_paper: bool


def paper_machines(constants: Constants = FITTED) -> list[Machine]:
    """The paper's testbed, once for each reading of its link speed."""
    return [Machine(label, constants.on(links), True) for label, links in READINGS.items()]


@dataclass(frozen=True)
class Variant:
    """A way of Split-KV that the paper does not have, at a point of one of its settings."""

    setting: str
    model: str
    method: str
    x: int
    seconds: float


@dataclass
class MachineStudy:
    """All results on one machine.

    Args:
        machine: which.
        predictions: at the paper's bars.
        variants: at the same points.
        beyond: by model.
    """

    machine: Machine
    predictions: list[Prediction] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    beyond: dict[str, list[Cell]] = field(default_factory=dict)

    def order(self) -> OrderSummary:
        """See `order_of_methods`."""
        return order_of_methods(self.predictions)

    def best_variant(self, setting: str, model: str, x: int) -> Variant:
        """The quickest of the variants at a point.

        Args:
            setting: of the paper.
            model: drafter.
            x: CP size or ratio.
        """
        here = [v for v in self.variants if (v.setting, v.model, v.x) == (setting, model, x)]
        return min(here, key=lambda v: v.seconds)


def study_machine(
    machine: Machine,
    constants: Constants = FITTED,
    *,
    settings: Sequence[str] = (*SETTINGS, BEYOND),
    models: Sequence[str] = MODELS,
) -> MachineStudy:
    """Predict the chosen settings for the chosen drafters on one machine."""
    study = MachineStudy(machine)
    bars = [bar for bar in all_bars() if bar.setting in settings and bar.model in models]
    study.predictions = predict(machine.links, constants, bars)
    study.variants = list(_variants(machine.links, constants, settings, models))
    if BEYOND in settings:
        for model in models:
            drafter = DFlashConfig.preset(model)
            study.beyond[model] = list(explore(drafter, machine.links, constants))
    return study


def _variants(
    links: Links, constants: Constants, settings: Sequence[str], models: Sequence[str]
) -> Iterator[Variant]:
    for setting in settings:
        if setting == BEYOND:
            continue
        for x in points_of(setting):
            workload = workload_of(setting, x)
            for model in models:
                drafter = DFlashConfig.preset(model)
                for name, method in OUR_METHODS.items():
                    time = step_seconds(method, workload, drafter, links, constants)
                    yield Variant(setting, model, name, x, time.total)


def to_json(study: MachineStudy, constants: Constants = FITTED) -> dict[str, object]:
    """The results as JSON values; comparisons only where the paper's bars apply."""
    is_paper = study.machine.is_paper
    result: dict[str, object] = {
        "machine": study.machine.label,
        "links": asdict(study.machine.links),
        "steps": [
            {
                "setting": p.bar.setting,
                "model": p.bar.model,
                "method": p.bar.method,
                "x": p.bar.x,
                "modelled_seconds": p.modelled.total,
                "parts": asdict(p.modelled),
                **(
                    {
                        "measured_seconds": p.bar.seconds,
                        "error": p.error,
                        "held_out": p.held_out,
                    }
                    if is_paper
                    else {}
                ),
            }
            for p in study.predictions
        ],
        "variants": [asdict(variant) for variant in study.variants],
        "beyond": {
            model: [{**asdict(cell), "fastest": cell.fastest} for cell in cells]
            for model, cells in study.beyond.items()
        },
    }
    if is_paper and study.predictions:
        errors = error_table(study.predictions)
        result["held_out_errors"] = [
            {"method": method, "setting": setting, **asdict(summary)}
            for (method, setting), summary in errors.items()
        ]
        result["order"] = asdict(study.order())
        result["sensitivity"] = {
            name: {"factor": factor, "splitkv_error": own, "all_error": every}
            for name, (factor, own, every) in sensitivity(
                study.machine.links, constants, [p.bar for p in study.predictions]
            ).items()
        }
    return result
