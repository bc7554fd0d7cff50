"""Writes real Megatron checkpoints of a small DFlash drafter; runs on the ranks of a gloo pool."""

import gc
from pathlib import Path
from typing import Any

import torch

from tests.drafter.harness import Sample, build_model, make_sample, parallel_state

CONTEXT, ANCHORS = 12, (5, 9)


def draft_sample() -> Sample:
    """One document of 12 tokens with two blocks."""
    return make_sample([CONTEXT], [True] * CONTEXT, anchors=ANCHORS, seed=11)


def save_checkpoints(stacked: str, numbered: str, tp: int) -> torch.Tensor:
    """Save one drafter with random weights twice: layers stacked, and layers by number.

    Args:
        stacked: an iteration's folder, existing.
        numbered: another one.
        tp: tensor-parallel ranks, all of the pool.

    Returns:
        What this model drafts for `draft_sample`, before the head.
    """
    with parallel_state(tp, 1):
        from megatron.core import dist_checkpointing
        from megatron.core.parallel_state import get_data_parallel_group

        model = build_model(tp, 1)
        _shake_norms(model)
        for folder, by_number in ((stacked, False), (numbered, True)):
            metadata = {
                "dp_cp_group": get_data_parallel_group(with_context_parallel=True),
                "distrib_optim_sharding_type": "fully_reshardable",
                "non_homogeneous_layers": by_number,
            }
            state = {
                "model": model.sharded_state_dict(metadata=metadata),
                "optimizer": _optimizer_state(model, metadata),
                "args": {"lr": 1.0},
                "iteration": 3,
            }
            dist_checkpointing.save(state, folder)
        _end_result_queue()

        sample = draft_sample()
        plan = sample.plan(1)
        with torch.no_grad():
            return model.draft(sample.batch(plan, 0), plan)


def _shake_norms(model: Any) -> None:
    """Norms start at one: make each distinguishable, alike on all ranks."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def _optimizer_state(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Adam's first moments under the keys that Megatron's optimizers give them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    model_state = model.sharded_state_dict(metadata=metadata)
    moments = {}
    for name, entry in model_state.items():
        if isinstance(entry, ShardedTensor):
            entry.key = f"optimizer.state.exp_avg.{entry.key}"
            entry.data = torch.full_like(entry.data, 9.0)
            moments[name] = entry
    return moments


def _end_result_queue() -> None:
    """Megatron keeps a process for its writer's results, which would outlive a killed rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None
    gc.collect()


def write_tracker(root: Path, text: str) -> None:
    """The file in which Megatron notes its latest checkpoint."""
    (root / "latest_checkpointed_iteration.txt").write_text(text)
