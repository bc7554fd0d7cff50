"""Checkpoints: who writes what, and that a run goes on at another layout as if nothing had been."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_splitkv.testing import relative_error
from tests.distributed.layouts import Layout, packs_of, trainer
from tests.drafter.harness import on_ranks

# Ranks that import Megatron on a busy machine take their time.

SAVED_AFTER = 2
PLAIN_CP2 = Layout(4, cp=2, overlap=True)
PLAIN_TP2 = Layout(4, tp=2, cp=2)
SPLIT_CP2 = Layout(4, cp=2, distributed=True, overlap=True)
SPLIT_TP2 = Layout(4, tp=2, cp=2, distributed=True)
BF16 = Layout(4, tp=2, distributed=True, overlap=True, bf16=True)
SOURCES = (PLAIN_CP2, PLAIN_TP2, SPLIT_CP2, SPLIT_TP2, BF16)


@dataclass
class Saved:
    """What a rank knew when it saved, and the step that it took next."""

    state: dict[str, torch.Tensor]
    loss: float
    norm: float
    parameters: dict[str, torch.Tensor]
    owned: list[tuple[str, tuple[int, ...]]]


def train_and_save(layout: Layout, path: str) -> Saved:
    with trainer(layout) as running:
        for step in range(SAVED_AFTER):
            running.step(packs_of(step))
        running.save(path)
        state, owned = running.optimizer_state(), owned_parts(running.sharded_state())
        return Saved(state, *running.step(packs_of(SAVED_AFTER)), running.parameters(), owned)


def owned_parts(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Keys and offsets of the tensors that this rank writes."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )

    parts = []
    for sharded in nested_values(state):
        for part in sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]:
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
                parts.append((part.key, tuple(part.global_offset)))
    return parts


def load_and_step(layout: Layout, path: str) -> Saved:
    with trainer(layout, init_seed=99) as running:
        running.load(path)
        state = running.optimizer_state()
        return Saved(state, *running.step(packs_of(SAVED_AFTER)), running.parameters(), [])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, tuple[Path, list[Saved]]]:
    runs = {}
    for layout in SOURCES:
        path = tmp_path_factory.mktemp("checkpoint")
        runs[str(layout)] = path, on_ranks(4, train_and_save, layout, str(path))
    return runs


@pytest.mark.parametrize("layout", SOURCES, ids=str)
def test_every_tensor_has_exactly_one_main_replica(layout: Layout, saved: Any) -> None:
    owners = Counter(part for rank in saved[str(layout)][1] for part in rank.owned)
    assert len(owners) > 20
    assert set(owners.values()) == {1}
    keys = {key for key, _ in owners}
    assert "fc.weight" in keys
    assert "decoder.layers.self_attention.linear_kv.weight" in keys
    assert any(key.startswith("optimizer.state.exp_avg.") for key in keys)
    assert not [key for key in keys if "vocabulary" in key or "embedding" in key or "head" in key]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (PLAIN_CP2, Layout(4, cp=4)),
        (PLAIN_CP2, Layout(4)),
        (PLAIN_CP2, PLAIN_TP2),
        (PLAIN_TP2, PLAIN_CP2),
        (SPLIT_CP2, SPLIT_CP2),
        (SPLIT_CP2, SPLIT_TP2),
        (SPLIT_CP2, Layout(4, cp=4, distributed=True)),
        (SPLIT_TP2, Layout(4, distributed=True, overlap=True)),
        (SPLIT_TP2, Layout(4, tp=2, distributed=True, overlap=True)),
        (BF16, Layout(4, cp=4, bf16=True, distributed=True)),
    ],
    ids=str,
)
def test_resuming_elsewhere_is_bitwise_and_goes_on_alike(
    source: Layout, target: Layout, saved: Any
) -> None:
    path, ranks = saved[str(source)]
    expected = ranks[0]
    tolerance = 1e-2 if source.bf16 else 1e-5
    for rank in on_ranks(4, load_and_step, target, str(path)):
        assert rank.state.keys() == expected.state.keys()
        for name, tensor in expected.state.items():
            assert torch.equal(rank.state[name], tensor), name
        assert rank.state["steps"].tolist() == [SAVED_AFTER]
        assert rank.loss == pytest.approx(expected.loss, rel=tolerance)
        assert rank.norm == pytest.approx(expected.norm, rel=tolerance)
        for name, parameter in expected.parameters.items():
            assert relative_error(rank.parameters[name], parameter) < tolerance, name


# Megatron's faults, and what mends them: see `compat.distributed_optimizer`.


def faults_without(mended: str | None, path: str) -> dict[str, Any]:
    """What happens at save before the first step, at load, and after it; one mend taken away."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with trainer(SPLIT_CP2) as running, ExitStack() as stack:
        (optimizer,) = running.optimizer.chained_optimizers
        if mended is not None:
            upstream = getattr(DistributedOptimizer, mended)
            stack.enter_context(mock.patch.object(type(optimizer), mended, upstream))
        try:
            optimizer.state_dict()
            running.load(path)
        except (AssertionError, KeyError) as error:
            return {"error": type(error).__name__}
        counts = [state["step"] for state in optimizer.optimizer.state.values()]
        tensors = len({count.data_ptr() for count in counts})
        running.step(packs_of(SAVED_AFTER))
        steps = sorted({float(count) for count in counts})
        return {"counts": len(counts), "tensors": tensors, "steps": steps}


def test_each_mend_of_the_distributed_optimizer_is_needed(saved: Any) -> None:
    path = str(saved[str(SPLIT_CP2)][0])
    whole = on_ranks(4, faults_without, None, path)[0]
    assert whole["counts"] == whole["tensors"] > 5
    assert whole["steps"] == [SAVED_AFTER + 1]
    assert on_ranks(4, faults_without, "state_dict", path)[0] == {"error": "AssertionError"}
    no_step = on_ranks(4, faults_without, "_set_main_param_and_optimizer_states", path)[0]
    assert no_step == {"error": "KeyError"}
    aliased = on_ranks(4, faults_without, "load_state_dict", path)[0]
    assert aliased["tensors"] == 1
    assert aliased["steps"] == [SAVED_AFTER + aliased["counts"]]


def save_without_bucket_padding(path: str) -> dict[str, torch.Tensor]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "sharded_param_state_fully_reshardable"
    with trainer(SPLIT_CP2) as running:
        running.step(packs_of(0))
        (optimizer,) = running.optimizer.chained_optimizers
        (buffer,) = optimizer.buffers
        assert len(buffer.buckets) > 1
        assert buffer.numel_unpadded < buffer.buckets[-1].offset + buffer.buckets[-1].numel_unpadded
        with mock.patch.object(type(optimizer), name, getattr(DistributedOptimizer, name)):
            running.save(path)
        return running.optimizer_state()


def load(path: str) -> dict[str, torch.Tensor]:
    with trainer(SPLIT_CP2) as running:
        running.load(path)
        return running.optimizer_state()


def test_the_mend_of_padded_buckets_is_needed(tmp_path: Path) -> None:
    before = on_ranks(4, save_without_bucket_padding, str(tmp_path))[0]
    after = on_ranks(4, load, str(tmp_path))[0]
    wrong = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert len(wrong) > 10
