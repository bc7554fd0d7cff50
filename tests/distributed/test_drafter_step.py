"""One training step of the drafter at every parallel layout: same loss, same gradients.

Megatron's own schedule, DDP and finalize_model_grads with per-token loss; one global batch of four
packs, so that the layouts run it with one, two or four micro-batches a rank.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_splitkv.testing import relative_error
from tests.distributed.steps import plain_step
from tests.drafter.harness import (
    TINY,
    Sample,
    StepResult,
    awkward_samples,
    make_sample,
    on_ranks,
    train_step,
)
from tests.drafter.naive_drafter import naive_drafter_loss

# Ranks that import Megatron on a busy machine take their time.

TOLERANCE = 1e-5

# (ranks, tp, cp); what is left of the ranks is data-parallel.
LAYOUTS = [(4, 1, 1), (4, 1, 2), (3, 1, 3), (4, 1, 4), (4, 2, 1), (4, 2, 2)]
ids = [f"tp{tp}-cp{cp}-dp{ranks // tp // cp}" for ranks, tp, cp in LAYOUTS]


@cache
def truth() -> StepResult:
    """The step in fp64 by the plain-torch twin, from the weights that any layout starts with."""

    def loss_of(weights: Any, embedding: Any, head: Any, sample: Sample) -> tuple[Any, ...]:
        layout, features = sample.layout, sample.features.double()
        return naive_drafter_loss(TINY, weights, embedding, head, sample.pack, layout, features)

    return plain_step(step_at(4, 1, 1).weights, loss_of)


@cache
def step_at(ranks: int, tp: int, cp: int) -> StepResult:
    results = on_ranks(ranks, train_step, awkward_samples(), tp, cp)
    for other in results[1:]:
        assert_same_step(other, results[0], tolerance=0.0)
    return results[0]


def assert_same_step(actual: StepResult, expected: StepResult, tolerance: float) -> None:
    assert actual.loss == pytest.approx(expected.loss, rel=tolerance)
    assert actual.count == pytest.approx(expected.count, rel=tolerance)
    assert actual.gradients.keys() == expected.gradients.keys()
    errors = {
        name: relative_error(gradient, expected.gradients[name])
        for name, gradient in actual.gradients.items()
    }
    assert max(errors.values()) <= tolerance, errors


def test_the_samples_are_as_awkward_as_they_claim() -> None:
    ordinary, light, empty, lopsided = awkward_samples()
    keep = ordinary.layout.block_keep_mask.reshape(-1, 3)
    assert keep[0].sum() == 1
    assert keep[1].sum() == 0
    anchors = ordinary.layout.anchor_positions.reshape(-1, 3)[3]
    assert keep[3].all()
    assert np.diff(anchors).min() < TINY.block_size  # blocks of one document overlap
    assert not empty.layout.block_keep_mask.any()
    assert light.layout.block_keep_mask.all()
    plan = lopsided.plan(4)
    for rank in range(4):
        start, end = plan.key_ranges(rank)
        assert (start < end).any() == (rank == 2)
        assert lopsided.batch(plan, rank)["block_label_mask"].any() == (rank == 2)


@pytest.mark.parametrize(("ranks", "tp", "cp"), LAYOUTS, ids=ids)
def test_loss_and_all_gradients_equal_the_plain_twin(ranks: int, tp: int, cp: int) -> None:
    assert_same_step(step_at(ranks, tp, cp), truth(), TOLERANCE)


@pytest.mark.parametrize(("ranks", "tp", "cp"), LAYOUTS, ids=ids)
def test_initial_weights_and_report_are_the_same_at_every_layout(
    ranks: int, tp: int, cp: int
) -> None:
    step, reference = step_at(ranks, tp, cp), step_at(4, 1, 1)
    for name, weight in step.weights.items():
        assert torch.equal(weight, reference.weights[name]), name
    for name, pair in step.report.items():
        assert pair == pytest.approx(reference.report[name], rel=1e-6), name


def mean_of_means(numerator: torch.Tensor, weights: torch.Tensor, **_: Any) -> Any:
    """The wrong normalisation: each rank divides by its own weights."""
    count = 256 * (weights.sum() > 0).int()
    return numerator / weights.sum().clamp(min=1e-6) * 256, count


def constant_scale(numerator: torch.Tensor, weights: torch.Tensor, **_: Any) -> Any:
    """Rounding each rank's count by itself: right at first sight, wrong in the fourth digit."""
    return numerator * 256, (weights.sum() * 256).round().int()


def shifted_context(
    self: Sample, plan: Any, cp_rank: int, **options: Any
) -> dict[str, torch.Tensor]:
    """The wrong rotary phase: context positions one too high."""
    batch = ORIGINAL_BATCH(self, plan, cp_rank, **options)
    return {**batch, "context_positions": batch["context_positions"] + 1}


ORIGINAL_BATCH = Sample.batch
FAULTS = {
    "mean-of-means": ("megatron_splitkv.drafter.model.fixed_point_loss", mean_of_means),
    "constant-scale": ("megatron_splitkv.drafter.model.fixed_point_loss", constant_scale),
    "shifted-context": ("tests.drafter.harness.Sample.batch", shifted_context),
}


def faulty_step(fault: str, samples: Sequence[Sample]) -> StepResult:
    target, replacement = FAULTS[fault]
    with mock.patch(target, replacement):
        return train_step(samples, 1, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(fault: str) -> None:
    wrong = on_ranks(4, faulty_step, fault, awkward_samples())[0]
    worst = max(
        relative_error(gradient, truth().gradients[name])
        for name, gradient in wrong.gradients.items()
    )
    assert worst > 3 * TOLERANCE


def test_a3_ranks_with_unequal_counts_weigh_by_their_counts() -> None:
    """One pack on two CP ranks, 1 and 2 micro-batches: never the mean of the ranks' means."""
    lengths, mask = [30, 30], np.r_[np.ones(30), np.zeros(28), np.ones(2)] > 0
    anchors = [2, 5, 9, 14, 20, 24, 32, 58]  # the last is the second rank's only supervised block
    sample = make_sample(lengths, mask, anchors=anchors, seed=11)
    for samples in ([sample] * 2, [sample] * 4):
        at_cp2 = on_ranks(4, train_step, samples, 1, 2)[0]
        at_cp1 = on_ranks(4, train_step, [sample] * 4, 1, 1)[0]
        assert_same_step(at_cp2, _with_count(at_cp1, at_cp2.count), TOLERANCE)


def _with_count(step: StepResult, count: float) -> StepResult:
    """Repeating a pack changes its count and nothing else."""
    return StepResult(step.loss, count, step.report, step.gradients, step.weights)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap-grad-reduce"])
def test_a4_an_empty_pack_on_one_replica_does_not_hang(overlap: bool) -> None:
    """dp 2 x cp 2; the second replica's second micro-batch has no usable anchor."""
    full, short = np.ones(64) > 0, np.arange(64) >= 59
    ordinary = [make_sample([40, 24], full, num_anchors=4, seed=seed) for seed in (1, 2, 3)]
    for unusable in (np.zeros(64) > 0, short):
        last = make_sample([40, 24], unusable, num_anchors=4, seed=4)
        steps = on_ranks(
            4,
            train_step,
            [ordinary[0], ordinary[1], ordinary[2], last],
            1,
            2,
            None,
            overlap,
        )
        for step in steps:
            assert np.isfinite(step.loss)
            assert_same_step(step, steps[0], tolerance=0.0)


def test_a12_all_supervision_on_one_rank_equals_one_process() -> None:
    samples = [awkward_samples()[3]] * 4
    at_cp4 = on_ranks(4, train_step, samples, 1, 4)[0]
    at_cp1 = on_ranks(4, train_step, samples, 1, 1)[0]
    assert_same_step(at_cp4, at_cp1, TOLERANCE)


def test_a12_a_batch_without_supervision_logs_zero_and_has_zero_gradients() -> None:
    samples = [make_sample([7, 5, 2], np.zeros(14) > 0, seed=seed) for seed in range(4)]
    for step in on_ranks(4, train_step, samples, 1, 4):
        assert step.loss == 0.0
        assert step.count == pytest.approx(0.0, abs=1e-20)
        for name, pair in step.report.items():
            assert pair[0] / pair[1] == 0.0, name
        assert all((gradient == 0).all() for gradient in step.gradients.values())


def test_a10_head_norm_gradients_are_summed_over_tp() -> None:
    """`join_tp` has checked that both TP ranks hold equal gradients; here they are right too."""
    at_tp2 = step_at(4, 2, 2)
    names = [n for n in at_tp2.gradients if "q_layernorm" in n or "k_layernorm" in n]
    assert len(names) == 2 * TINY.num_layers
    for name in names:
        assert relative_error(at_tp2.gradients[name], step_at(4, 1, 1).gradients[name]) < TOLERANCE


def two_steps(samples: Sequence[Sample]) -> list[StepResult]:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    selective = {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    }
    return [train_step(samples, 2, 2, overrides) for overrides in (full, selective)]


def test_recomputing_activations_changes_no_gradient() -> None:
    for step in on_ranks(4, two_steps, awkward_samples())[0]:
        assert_same_step(step, step_at(4, 2, 2), tolerance=1e-6)


def step_without_tp_reduction(samples: Sequence[Sample]) -> StepResult:
    """Megatron sums head-norm gradients over TP because the configuration says qk_layernorm."""
    name = (
        "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    )
    with mock.patch(name, return_value=None):
        return train_step(samples, 2, 2)


def test_the_comparison_sees_a_missing_tp_reduction() -> None:
    """Last, because a failure costs the pool its ranks."""
    with pytest.raises(RuntimeError, match="TP ranks differ"):
        on_ranks(4, step_without_tp_reduction, awkward_samples())
