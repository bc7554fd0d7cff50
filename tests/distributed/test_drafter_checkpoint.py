"""Megatron's distributed checkpoint of a drafter: who writes what, and resuming elsewhere."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.drafter.harness import (
    StepResult,
    awkward_samples,
    build_model,
    data_parallel,
    join_tp,
    on_ranks,
    parallel_state,
    run_schedule,
)

# Ranks that import Megatron on a busy machine take their time.
pytestmark = pytest.mark.timeout(300)

STEPS_BEFORE_SAVING = 3


def optimizer_of(ddp: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.0, params_dtype=torch.float32, clip_grad=1.0
    )
    return get_megatron_optimizer(config, [ddp])


def sharded_state(ddp: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    from megatron.core import parallel_state as state

    metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
    model = ddp.module.sharded_state_dict(metadata=metadata)
    moments = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": moments}


def snapshot(ddp: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights and Adam moments, TP shards joined."""
    from megatron.core import parallel_state as state

    group = state.get_tensor_model_parallel_group()
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in ddp.module.named_parameters():
        tensors[name] = join_tp(parameter, parameter.detach().clone(), group=group)
        moments = optimizer.chained_optimizers[0].optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{key}"] = join_tp(parameter, moments[key].clone(), group=group)
    return tensors


def train_and_save(path: str, tp: int, cp: int) -> tuple[dict[str, torch.Tensor], StepResult, Any]:
    """Some steps, a checkpoint, and the step after it; with the main replicas of every rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedBase,
        ShardedTensorFactory,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with parallel_state(tp, cp):
        ddp = data_parallel(build_model(tp, cp))
        optimizer = optimizer_of(ddp)
        for _ in range(STEPS_BEFORE_SAVING):
            run_schedule(ddp, awkward_samples())
            optimizer.step()
        state = sharded_state(ddp, optimizer)
        owned = []
        for sharded in nested_values(state):
            parts = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
            owned += [
                (part.key, tuple(part.global_offset))
                for part in parts
                if isinstance(part, ShardedBase) and is_main_replica(part.replica_id)
            ]
        dist_checkpointing.save(sharded_state(ddp, optimizer), path)
        # Its manager process would outlive ranks that the pool ends.
        filesystem_async._results_queue = None
        dist.barrier()
        return snapshot(ddp, optimizer), run_schedule(ddp, awkward_samples()), owned


def load_and_step(path: str, tp: int, cp: int) -> tuple[dict[str, torch.Tensor], StepResult]:
    from megatron.core import dist_checkpointing

    with parallel_state(tp, cp):
        ddp = data_parallel(build_model(tp, cp, model_args={"init_seed": 99}))
        optimizer = optimizer_of(ddp)
        state = dist_checkpointing.load(sharded_state(ddp, optimizer, is_loading=True), path)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return snapshot(ddp, optimizer), run_schedule(ddp, awkward_samples())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    runs = {}
    for tp, cp in ((1, 2), (2, 2)):
        path = tmp_path_factory.mktemp(f"tp{tp}-cp{cp}")
        runs[tp, cp] = path, on_ranks(4, train_and_save, str(path), tp, cp)
    return runs


@pytest.mark.parametrize("layout", [(1, 2), (2, 2)], ids=["cp2-dp2", "tp2-cp2"])
def test_a14_every_tensor_has_exactly_one_main_replica(
    layout: tuple[int, int], saved: dict[tuple[int, int], Any]
) -> None:
    _, ranks = saved[layout]
    owners = Counter(part for _, _, owned in ranks for part in owned)
    assert len(owners) > 20
    assert set(owners.values()) == {1}
    keys = {key for key, _ in owners}
    assert "fc.weight" in keys
    assert "decoder.layers.self_attention.linear_kv.weight" in keys
    assert not [key for key in keys if "vocabulary" in key or "embedding" in key or "head" in key]


@pytest.mark.parametrize(
    ("source", "ranks", "tp", "cp"),
    [
        ((1, 2), 4, 1, 4),
        ((1, 2), 4, 1, 1),
        ((1, 2), 4, 2, 2),
        ((2, 2), 4, 1, 2),
    ],
    ids=["cp2-to-cp4", "cp2-to-cp1", "cp2-to-tp2-cp2", "tp2-cp2-to-cp2"],
)
def test_a14_resuming_elsewhere_is_bitwise_and_goes_on_alike(
    source: tuple[int, int], ranks: int, tp: int, cp: int, saved: dict[tuple[int, int], Any]
) -> None:
    path, runs = saved[source]
    tensors, next_step, _ = runs[0]
    for loaded, step in on_ranks(ranks, load_and_step, str(path), tp, cp):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor), name
        assert step.loss == pytest.approx(next_step.loss, rel=1e-6)
