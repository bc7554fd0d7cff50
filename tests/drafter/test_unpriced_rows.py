"""Rows that weigh nothing reach neither loss nor gradient, whatever they hold."""

import pytest
import torch

from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.loss import slot_weights
from tests.drafter.harness import (
    TINY,
    TINY_DOMINO,
    TINY_DSPARK,
    awkward_samples,
    build_model,
    on_ranks,
    parallel_state,
)


def _loss_and_gradients(config: DFlashConfig, fill: float) -> list[torch.Tensor]:
    """Of rows after the backbone, then of all parameters that the loss reads."""
    sample = awkward_samples()[0]
    with parallel_state(1, 1):
        model = build_model(1, 1, dflash=config)
        plan = sample.plan(1)
        batch = sample.batch(
            plan, 0, label_shift=config.label_shift, teacher=config.needs_final_hidden
        )
        weights = slot_weights(
            batch["block_label_mask"],
            config.block_size,
            config.loss_decay_gamma,
            config.first_trained_slot,
        )
        hidden = model.draft(batch, plan).detach()
        hidden[weights == 0] = fill
        hidden.requires_grad_()
        numerator, *_ = model.loss(hidden, batch, weights.clone())
        numerator.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert (weights == 0).any()
        assert hidden.grad is not None
        return [numerator.detach(), hidden.grad, *gradients]


@pytest.mark.parametrize("config", [TINY, TINY_DOMINO, TINY_DSPARK], ids=lambda c: c.kind)
def test_not_a_number_in_rows_without_weight(config: DFlashConfig) -> None:
    (clean,) = on_ranks(1, _loss_and_gradients, config, 0.0)
    (poisoned,) = on_ranks(1, _loss_and_gradients, config, float("nan"))
    assert len(clean) == len(poisoned)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
    assert all(torch.isfinite(x).all() for x in clean)
