"""Steps that others are held against: of one plain process in fp64, and of another precision."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_splitkv.drafter import DFlashConfig
from tests.drafter.harness import (
    TINY,
    StepResult,
    awkward_samples,
    build_model,
    data_parallel,
    frozen_target,
    make_sample,
    parallel_state,
    run_schedule,
)


def plain_step(
    start: Mapping[str, torch.Tensor],
    loss_of: Callable[..., tuple[Any, ...]],
) -> StepResult:
    """A step on the awkward samples in fp64, by a plain-torch twin on one process.

    Args:
        start: the weights that any layout starts with.
        loss_of: (weights, embedding, head, sample) -> numerator and weight of a pack, and more.
    """
    weights = {name: weight.double().requires_grad_() for name, weight in start.items()}
    embedding, head = (weight.double() for weight in frozen_target())
    scaled, tokens, numerator, total = 0.0, 0, 0.0, 0.0
    for sample in awkward_samples():
        part, weight, *_ = loss_of(weights, embedding, head, sample)
        count = max(1, round(256 * weight)) if weight else 0
        scaled = scaled + part * (count / weight if weight else 0.0)
        tokens, numerator, total = tokens + count, numerator + float(part.detach()), total + weight
    (scaled / tokens).backward()
    gradients = {name: weight.grad for name, weight in weights.items()}
    return StepResult(numerator / total, total, {}, gradients, dict(start))


def step_in(dtype: torch.dtype, dflash: DFlashConfig = TINY) -> StepResult:
    """A step at tp 2, cp 2 with parameters of that dtype."""
    with parallel_state(tp=2, cp=2):
        precision = {"bf16": True, "params_dtype": dtype} if dtype == torch.bfloat16 else {}
        ddp = data_parallel(build_model(2, 2, dflash=dflash, **precision))
        assert {p.dtype for p in ddp.parameters()} == {dtype}
        samples = [make_sample([30, 21], torch.ones(51) > 0, num_anchors=6, seed=s) for s in (1, 2)]
        return run_schedule(ddp, samples)
