"""One training step of a DFlash drafter with all its options: the plain twin's, at every layout.

Sliding layers, a scaled embedding, capped logits, D-PACE weights, and the target as a teacher.
"""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.testing import relative_error
from tests.distributed.steps import plain_step
from tests.drafter.harness import (
    TINY,
    Sample,
    StepResult,
    awkward_samples,
    build_model,
    frozen_target,
    on_ranks,
    parallel_state,
    train_step,
)
from tests.drafter.naive_drafter import logits_of, naive_drafter_loss, naive_hidden

# Ranks that import Megatron on a busy machine take their time.

TOLERANCE = 1e-5
SLIDING = replace(
    TINY,
    num_layers=3,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    sliding_window=3,  # shorter than a block
)
DRAFTERS: dict[str, DFlashConfig] = {
    "sliding": SLIDING,
    "wider-window": replace(SLIDING, sliding_window=6, input_embedding_scale=3.5),
    "cap": replace(TINY, final_logit_softcapping=2.5, input_embedding_scale=0.5),
    "dpace": replace(TINY, loss_weights="dpace"),
    "distilled": replace(TINY, distillation_weight=0.6),
    "all": replace(
        SLIDING,
        input_embedding_scale=2.0,
        final_logit_softcapping=4.0,
        loss_weights="dpace",
        distillation_weight=0.4,
    ),
}
# (ranks, tp, cp); what is left of the ranks is data-parallel.
LAYOUTS = {
    "dpace": [(4, 1, 1), (4, 1, 2), (3, 1, 3), (4, 1, 4)],
    "all": [(4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2), (8, 2, 4)],
}


@cache
def truth(name: str) -> StepResult:
    """The step in fp64 by the plain-torch twin, from the weights that any layout starts with."""
    drafter = DRAFTERS[name]
    start = on_ranks(4, train_step, awkward_samples(), 1, 1, None, False, drafter)[0].weights

    def loss_of(weights: Any, embedding: Any, head: Any, sample: Sample) -> tuple[Any, ...]:
        assert sample.final_hidden is not None
        layout, features = sample.layout, sample.features.double()
        teacher = sample.final_hidden.double()
        return naive_drafter_loss(
            drafter, weights, embedding, head, sample.pack, layout, features, teacher
        )

    return plain_step(start, loss_of)


def worst_error(step: StepResult, expected: StepResult) -> float:
    assert step.gradients.keys() == expected.gradients.keys()
    errors = [
        relative_error(step.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
    ]
    loss, count = abs(step.loss / expected.loss - 1), abs(step.count / expected.count - 1)
    return float(max(*errors, loss, count))


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in DRAFTERS for layout in LAYOUTS.get(name, [(4, 1, 4), (4, 2, 2)])],
    ids=lambda x: x if isinstance(x, str) else "tp{1}-cp{2}".format(*x),
)
def test_a_step_is_that_of_one_plain_process(name: str, layout: tuple[int, int, int]) -> None:
    ranks, tp, cp = layout
    expected = truth(name)
    for step in on_ranks(ranks, train_step, awkward_samples(), tp, cp, None, False, DRAFTERS[name]):
        assert worst_error(step, expected) < TOLERANCE
        assert ("kl to target" in step.report) == (DRAFTERS[name].distillation_weight > 0)
        assert all(torch.equal(step.weights[key], expected.weights[key]) for key in step.weights)


def sliding_steps(tp: int, cp: int) -> dict[str, StepResult]:
    """A step of sliding layers for every way in which queries or keys may travel."""
    from megatron_splitkv.drafter import get_dflash_layer_spec

    variants: dict[str, dict[str, Any]] = {name: {"cp_comm_type": name} for name in CP_COMM_TYPES}
    for gather, scatter, cast in (("hidden", "proj", "all"), ("hidden", "heads", "group")):
        options = SplitKVOptions(gather=gather, scatter=scatter, query_cast=cast)
        spec = get_dflash_layer_spec("local", splitkv=options)
        variants[f"{gather}-{scatter}-{cast}"] = {"model_args": {"layer_spec": spec}}
    variants["a type a layer"] = {"cp_comm_type": ["p2p", "splitkv", "a2a"]}
    variants["recomputed"] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    drafter = DRAFTERS["sliding"]
    return {
        name: train_step(awkward_samples(), tp, cp, change, False, drafter)
        for name, change in variants.items()
    }


@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2)])
def test_windows_hold_whatever_travels(tp: int, cp: int) -> None:
    errors = {
        name: worst_error(step, truth("sliding"))
        for name, step in on_ranks(4, sliding_steps, tp, cp)[0].items()
    }
    assert max(errors.values()) < TOLERANCE, errors


def logits_on_one_rank(drafter: DFlashConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    with parallel_state(tp=1, cp=1), torch.no_grad():
        model, sample = build_model(1, 1, dflash=drafter), awkward_samples()[0]
        plan = sample.plan(1, drafter.windows)
        hidden = model.draft(sample.batch(plan, 0), plan)
        return {n: p.clone() for n, p in model.named_parameters()}, logits_of(
            drafter, frozen_target()[1], hidden
        )


@pytest.mark.parametrize("name", ["wider-window", "all"])
def test_logits_are_those_of_the_plain_twin(name: str) -> None:
    drafter, sample = DRAFTERS[name], awkward_samples()[0]
    weights, logits = on_ranks(4, logits_on_one_rank, drafter)[0]
    embedding, head = (weight.double() for weight in frozen_target())
    weights = {key: weight.double() for key, weight in weights.items()}
    *_, keep, hidden = naive_hidden(
        drafter, weights, embedding, sample.pack, sample.layout, sample.features.double()
    )
    expected = logits_of(drafter, head, hidden)
    assert relative_error(logits[: len(keep)][keep], expected[keep]) < TOLERANCE


WRONG: dict[str, Any] = {
    "window-one-short": ("sliding", {"sliding_window": 2}),
    "window-on-the-wrong-layer": (
        "sliding",
        {"layer_types": ("full_attention", "sliding_attention", "sliding_attention")},
    ),
    "no-scale": ("wider-window", {"input_embedding_scale": 1.0}),
    "no-cap": ("cap", {"final_logit_softcapping": None}),
    "decay": ("dpace", {"loss_weights": "decay"}),
    "no-teacher": ("distilled", {"distillation_weight": 0.0}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_comparison_sees(fault: str) -> None:
    name, change = WRONG[fault]
    drafter = replace(DRAFTERS[name], **change)
    step = on_ranks(4, train_step, awkward_samples(), 1, 2, None, False, drafter)[0]
    assert worst_error(step, truth(name)) > 100 * TOLERANCE


def mean_of_rank_means(numerator: torch.Tensor, weights: torch.Tensor, **_: Any) -> Any:
    """The wrong normalisation: each rank divides by the weights that D-PACE gave its own blocks."""
    count = 256 * (weights.sum() > 0).int()
    return numerator / weights.sum().clamp(min=1e-6) * 256, count


def wrongly_normalised(name: str) -> StepResult:
    with mock.patch("megatron_splitkv.drafter.model.fixed_point_loss", mean_of_rank_means):
        return train_step(awkward_samples(), 1, 2, None, False, DRAFTERS[name])


def test_weights_of_one_rank_are_no_denominator() -> None:
    assert worst_error(on_ranks(4, wrongly_normalised, "dpace")[0], truth("dpace")) > 1e-3
