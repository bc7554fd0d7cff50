"""One training step of a DSpark drafter at every parallel layout."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import CommMeter
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.loss.dspark import chunked_dspark_loss, naive_dspark_loss
from megatron_splitkv.testing import relative_error
from tests.distributed.steps import plain_step, step_in
from tests.drafter import naive_dspark
from tests.drafter.harness import (
    TINY_DSPARK,
    Sample,
    StepResult,
    awkward_samples,
    build_model,
    data_parallel,
    on_ranks,
    parallel_state,
    run_schedule,
)

# Ranks that import Megatron on a busy machine take their time.

TOLERANCE = 1e-5
KINDS = {kind: replace(TINY_DSPARK, markov_head_type=kind) for kind in ("vanilla", "gated", "rnn")}
CAPPED = replace(TINY_DSPARK, final_logit_softcapping=4.0, ce_weight=1.0, confidence_weight=0.3)

# (ranks, tp, cp); what is left of the ranks is data-parallel.
LAYOUTS = [(4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2), (8, 2, 4)]
CASES = [(*layout, drafter) for drafter in KINDS.values() for layout in LAYOUTS]
CASES.append((4, 2, 2, CAPPED))


def case_id(case: Any) -> str:
    ranks, tp, cp, drafter = case
    capped = "-capped" if drafter.final_logit_softcapping else ""
    return f"{drafter.markov_head_type}{capped}-tp{tp}-cp{cp}-dp{ranks // tp // cp}"


@torch.no_grad()
def set_biases(model: torch.nn.Module) -> None:
    """They start at zero, which would hide what they do."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()))


def step(tp: int, cp: int, drafter: DSparkConfig, **overrides: Any) -> StepResult:
    with parallel_state(tp, cp):
        model = build_model(tp, cp, dflash=drafter, **overrides)
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        assert biases
        assert not any(bias.any() for bias in biases)
        set_biases(model)
        return run_schedule(data_parallel(model), awkward_samples())


@cache
def truth(drafter: DSparkConfig) -> StepResult:
    """The step in fp64 by the plain-torch twin, from the weights that any layout starts with."""

    def loss_of(weights: Any, embedding: Any, head: Any, sample: Sample) -> tuple[Any, ...]:
        assert sample.final_hidden is not None
        layout, features = sample.layout, sample.features.double()
        teacher = sample.final_hidden.double()
        return naive_dspark.naive_dspark_loss(
            drafter, weights, embedding, head, sample.pack, layout, features, teacher
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
        mixed = drafter.ce_weight * report["ce loss"] + drafter.l1_weight * report["l1 loss"]
        mixed += drafter.confidence_weight * report["confidence loss"]
        assert report["lm loss"] == pytest.approx(mixed, rel=TOLERANCE)
        assert 0 < report["confidence error"] < 1
        assert 1 < report["sampled_accept_len"] < 1 + drafter.num_proposals


def test_the_heads_have_their_public_names_and_sizes() -> None:
    for drafter in KINDS.values():
        shapes = {name: tuple(p.shape) for name, p in truth(drafter).weights.items()}
        for name, shape in drafter.head_shapes().items():
            assert shapes[name] == shape
        parameters = sum(weight.numel() for weight in truth(drafter).weights.values())
        assert parameters == drafter.num_parameters()


def test_the_loss_is_not_blind_to_slots_behind_a_gap() -> None:
    """The samples have responses with gaps, or the rule about them would be tested by nothing."""
    masks = []
    for sample in awkward_samples():
        mask = sample.batch(sample.plan(1), 0, label_shift=1)["block_label_mask"].view(-1, 4)
        masks.append(mask)
    mask = torch.cat(masks)
    assert (mask.long().cumprod(dim=1) != mask).any()


def split_loss(bounds: list[int], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    hidden, latent, head, markov, labels, weights, teacher = tensors
    rank = dist.get_rank()
    mine = slice(bounds[rank], bounds[rank + 1])
    trained = [t.clone().requires_grad_() for t in (hidden, latent, markov[mine])]
    with CommMeter() as meter:
        found = chunked_dspark_loss(
            trained[0],
            trained[1],
            head[mine],
            trained[2],
            labels,
            weights,
            teacher,
            ce_weight=0.1,
            l1_weight=0.9,
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
    hidden, latent, head, markov, teacher = (
        torch.randn(shape, generator=generator)
        for shape in ((29, 16), (29, 6), (83, 16), (83, 6), (29, 16))
    )
    labels, weights = torch.randint(83, (29,), generator=generator), torch.rand(29)
    weights[::4] = 0.0
    tensors = (hidden, latent, head, markov, labels, weights, teacher)
    trained = [t.clone().requires_grad_() for t in (hidden, latent, markov)]
    expected = naive_dspark_loss(
        trained[0],
        trained[1],
        head,
        trained[2],
        labels,
        weights,
        teacher,
        ce_weight=0.1,
        l1_weight=0.9,
        softcap=2.0,
    )
    expected.numerator.backward()
    ranks = on_ranks(4, split_loss, bounds, tensors)
    for found, (of_hidden, of_latent, _), calls in ranks:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=1e-6)
        assert relative_error(of_hidden, trained[0].grad) < 2e-6
        assert relative_error(of_latent, trained[1].grad) < 2e-6
        assert calls == 5 * -(-int((weights > 0).sum()) // 7) + 1  # per chunk, and one dgrad
    whole = torch.cat([gradients[2] for _, gradients, _ in ranks])
    assert relative_error(whole, trained[2].grad) < 2e-6


def test_bf16_is_close_to_fp32() -> None:
    low, full = (
        on_ranks(4, step_in, dtype, KINDS["rnn"])[0] for dtype in (torch.bfloat16, torch.float32)
    )
    assert low.loss == pytest.approx(full.loss, rel=1e-2)
    for name, gradient in low.gradients.items():
        assert relative_error(gradient, full.gradients[name]) < 0.15, name
