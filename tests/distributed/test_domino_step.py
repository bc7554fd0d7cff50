"""One training step of a Domino drafter at every parallel layout."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import CommMeter
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.loss.domino import chunked_domino_loss, naive_domino_loss
from megatron_splitkv.testing import relative_error
from tests.distributed.steps import plain_step, step_in
from tests.drafter import naive_domino
from tests.drafter.harness import (
    TINY_DOMINO,
    Sample,
    StepResult,
    awkward_samples,
    build_model,
    data_parallel,
    make_sample,
    on_ranks,
    parallel_state,
    run_schedule,
)

# Ranks that import Megatron on a busy machine take their time.

TOLERANCE = 1e-5
PROGRESS, BASE_WEIGHT = 0.15, 0.7  # lambda falls from 1 to 0 over the first half
UNSHIFTED = replace(TINY_DOMINO, shift_label=False)
TWO_ALONE = replace(TINY_DOMINO, pure_draft_prefix_len=2)
NONE_ALONE = replace(UNSHIFTED, pure_draft_prefix_len=0)

# (ranks, tp, cp, drafter); what is left of the ranks is data-parallel.
CASES = [
    (4, 1, 1, TINY_DOMINO),
    (4, 1, 2, TINY_DOMINO),
    (4, 1, 4, TINY_DOMINO),
    (4, 2, 1, TINY_DOMINO),
    (4, 2, 2, TINY_DOMINO),
    (8, 2, 4, TINY_DOMINO),
    (4, 1, 2, UNSHIFTED),
    (4, 2, 2, UNSHIFTED),
    (4, 2, 2, TWO_ALONE),
    (4, 1, 4, NONE_ALONE),
]


def case_id(case: Any) -> str:
    ranks, tp, cp, drafter = case
    shift = "shifted" if drafter.shift_label else "unshifted"
    return f"tp{tp}-cp{cp}-dp{ranks // tp // cp}-{shift}-{drafter.pure_draft_prefix_len}"


def step(tp: int, cp: int, drafter: DominoConfig, **overrides: Any) -> StepResult:
    with parallel_state(tp, cp):
        ddp = data_parallel(build_model(tp, cp, dflash=drafter, **overrides))
        ddp.module.training_progress = PROGRESS
        return run_schedule(ddp, awkward_samples())


@cache
def truth(drafter: DominoConfig) -> StepResult:
    """The step in fp64 by the plain-torch twin, from the weights that any layout starts with."""

    def loss_of(weights: Any, embedding: Any, head: Any, sample: Sample) -> tuple[Any, ...]:
        layout, features = sample.layout, sample.features.double()
        return naive_domino.naive_domino_loss(
            drafter, weights, embedding, head, sample.pack, layout, features, BASE_WEIGHT
        )

    return plain_step(on_ranks(4, step, 1, 1, drafter)[0].weights, loss_of)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_step_is_that_of_one_plain_process(case: Any) -> None:
    ranks, tp, cp, drafter = case
    expected = truth(drafter)
    for result in on_ranks(ranks, step, tp, cp, drafter):
        assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert result.count == pytest.approx(expected.count, rel=TOLERANCE)
        assert result.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert relative_error(result.gradients[name], gradient) < TOLERANCE, name
            assert torch.equal(result.weights[name], expected.weights[name]), name
        report = {name: n / d for name, (n, d) in result.report.items() if d > 1e-20}
        assert report["base loss weight"] == pytest.approx(BASE_WEIGHT)
        mixed = (1 - BASE_WEIGHT) * report["final loss"] + BASE_WEIGHT * report["base loss"]
        assert report["lm loss"] == pytest.approx(mixed, rel=TOLERANCE)


def weights_of_base_loss(finished_steps: list[int]) -> list[float]:
    from megatron_splitkv.train.forward_step import training_progress

    samples = [make_sample([12], np.ones(12))] * dist.get_world_size()
    found = []
    with parallel_state(1, 1):
        ddp = data_parallel(build_model(1, 1, dflash=TINY_DOMINO))
        for finished in finished_steps:
            args = SimpleNamespace(curr_iteration=finished, train_iters=100)
            ddp.module.training_progress = training_progress(args)
            numerator, denominator = run_schedule(ddp, samples).report["base loss weight"]
            found.append(numerator / denominator)
    return found


def test_lambda_follows_finished_steps_and_so_survives_a_resume() -> None:
    """Megatron counts finished steps in `curr_iteration`, from the checkpoint's on."""
    finished, expected = [0, 25, 40, 50, 99], [1.0, 0.5, 0.2, 0.0, 0.0]
    for weights in on_ranks(4, weights_of_base_loss, finished):
        assert weights == pytest.approx(expected, abs=1e-6)


def features_that_change(drafter: DominoConfig) -> list[list[int]]:
    """Which slots' corrections a token of the block reaches, one token at a time."""
    with parallel_state(2, 1):
        model = build_model(2, 1, dflash=drafter)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2 * drafter.block_size, drafter.hidden_size, generator=generator)
        tokens = torch.randint(60, (2 * drafter.block_size,), generator=generator)
        before = model.correction_features(hidden, tokens)
        reached = []
        for at in range(drafter.block_size):
            other = tokens.clone()
            other[at] = (other[at] + 1) % 60
            changed = (model.correction_features(hidden, other) != before).any(dim=1)
            reached.append(changed.nonzero().squeeze(1).tolist())
        return reached


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        # Slot k predicts what is behind it; slot 0 is the backbone's alone.
        (TINY_DOMINO, [[1, 2, 3], [1, 2, 3], [2, 3], [3]]),
        # Slot k predicts its own token; slot 1 is the backbone's alone.
        (UNSHIFTED, [[2, 3], [2, 3], [3], []]),
        (NONE_ALONE, [[1, 2, 3], [2, 3], [3], []]),
    ],
)
def test_a_token_reaches_the_corrections_of_later_labels_only(
    drafter: DominoConfig, expected: list[list[int]]
) -> None:
    """And none of the other block."""
    for reached in on_ranks(4, features_that_change, drafter):
        assert reached == expected


def test_the_heads_have_their_public_names_and_sizes() -> None:
    shapes = {name: tuple(p.shape) for name, p in truth(TINY_DOMINO).weights.items()}
    for name, shape in TINY_DOMINO.head_shapes().items():
        assert shapes[name] == shape
    parameters = sum(weight.numel() for weight in truth(TINY_DOMINO).weights.values())
    assert parameters == TINY_DOMINO.num_parameters()


def split_loss(bounds: list[int], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    hidden, features, head, correction, labels, weights = tensors
    rank = dist.get_rank()
    mine = slice(bounds[rank], bounds[rank + 1])
    trained = [t.clone().requires_grad_() for t in (hidden, features, correction[mine])]
    with CommMeter() as meter:
        found = chunked_domino_loss(
            trained[0],
            trained[1],
            head[mine],
            trained[2],
            labels,
            weights,
            0.4,
            softcap=2.0,
            tp_group=dist.group.WORLD,
            vocab_start=bounds[rank],
            chunk_rows=7,
        )
        found.numerator.backward()
    return [t.detach() for t in found], [t.grad for t in trained], meter.calls()


@pytest.mark.parametrize("bounds", [[0, 20, 41, 62, 83], [0, 1, 2, 80, 83]], ids=["even", "uneven"])
def test_split_vocabulary_equals_the_whole_one(bounds: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, features, head, correction = (
        torch.randn(shape, generator=generator) for shape in ((29, 16), (29, 6), (83, 16), (83, 6))
    )
    labels, weights = torch.randint(83, (29,), generator=generator), torch.rand(29)
    weights[::4] = 0.0
    tensors = (hidden, features, head, correction, labels, weights)
    trained = [t.clone().requires_grad_() for t in (hidden, features, correction)]
    expected = naive_domino_loss(
        trained[0], trained[1], head, trained[2], labels, weights, 0.4, softcap=2.0
    )
    expected.numerator.backward()
    ranks = on_ranks(4, split_loss, bounds, tensors)
    for found, (of_hidden, of_features, _), calls in ranks:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        assert relative_error(of_hidden, trained[0].grad) < 1e-6
        assert relative_error(of_features, trained[1].grad) < 1e-6
        assert calls == 5 * -(-int((weights > 0).sum()) // 7) + 1  # per chunk, and one dgrad
    whole = torch.cat([gradients[2] for _, gradients, _ in ranks])
    assert relative_error(whole, trained[2].grad) < 1e-6


def test_bf16_is_close_to_fp32() -> None:
    low, full = (
        on_ranks(4, step_in, dtype, TINY_DOMINO)[0] for dtype in (torch.bfloat16, torch.float32)
    )
    assert low.loss == pytest.approx(full.loss, rel=5e-3)
    for name, gradient in low.gradients.items():
        # At the start the correction's own gradients are zero.
        assert relative_error(gradient, full.gradients[name]) < 0.1 or not gradient.any(), name
