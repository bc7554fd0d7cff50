"""Writes real Megatron checkpoints of a small DFlash drafter; runs on the ranks of a gloo pool."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.drafter.harness import Sample, build_model, join_tp, make_sample, parallel_state

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


@dataclass
class Loaded:
    """A released drafter in a Megatron model, seen from one rank; TP shards joined."""

    weights: dict[str, torch.Tensor]
    drafted: torch.Tensor


def load_released(
    drafters: dict[str, str], layouts: Sequence[tuple[int, int]], save: dict[str, str]
) -> dict[tuple[str, tuple[int, int]], Loaded]:
    """Load released drafters into models of several layouts; save some as checkpoints.

    Args:
        drafters: folders by name.
        layouts: (tp, cp), all ranks of the pool.
        save: an iteration's existing folder by name, for the first layout.
    """
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as state

    from megatron_splitkv.export import from_zlab, read_drafter
    from megatron_splitkv.train.initial_drafter import load_initial_weights

    found = {}
    for layout in layouts:
        with parallel_state(*layout):
            for name, folder in drafters.items():
                config, tensors = read_drafter(folder)
                model = build_model(*layout, dflash=config)
                whole = from_zlab(tensors, config)
                load_initial_weights(model, whole, tp_group=model.tp_group)
                assert not whole
                if name in save and layout == layouts[0]:
                    group = state.get_data_parallel_group(with_context_parallel=True)
                    metadata = {
                        "dp_cp_group": group,
                        "distrib_optim_sharding_type": "fully_reshardable",
                    }
                    content = {"model": model.sharded_state_dict(metadata=metadata)}
                    dist_checkpointing.save(content, save[name])
                    _end_result_queue()
                sample = draft_sample()
                plan = sample.plan(layout[1], config.windows)
                batch = sample.batch(plan, state.get_context_parallel_rank())
                with torch.no_grad():
                    drafted = model.draft(batch, plan)
                weights = {
                    key: join_tp(parameter, parameter.detach(), group=model.tp_group)
                    for key, parameter in model.named_parameters()
                }
                found[name, layout] = Loaded(weights, drafted)
    return found


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
