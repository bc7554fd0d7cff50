"""Checkpoints of drafters with heads: whole tensors, which any layout loads its rows of."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.export.dcp_reader import TensorReader
from tests.distributed.layouts import Layout, packs_of, trainer
from tests.drafter.harness import TINY_DOMINO, TINY_DSPARK, on_ranks

# Ranks that import Megatron on a busy machine take their time.

DRAFTERS = [TINY_DOMINO, replace(TINY_DSPARK, markov_head_type="rnn")]
SPLIT = Layout(4, tp=2, cp=2, distributed=True)


def save(
    layout: Layout, drafter: DFlashConfig, path: str
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    with trainer(layout, drafter=drafter) as running:
        running.ddp.module.training_progress = 0.2  # both of Domino's losses have a share
        running.step(packs_of(0))
        running.save(path)
        whole = {
            sharded.key: tuple(sharded.global_shape)
            for sharded in running.sharded_state()["model"].values()
            if hasattr(sharded, "global_shape")
        }
        return running.optimizer_state(), whole


def load(layout: Layout, drafter: DFlashConfig, path: str) -> dict[str, torch.Tensor]:
    with trainer(layout, init_seed=99, drafter=drafter) as running:
        running.load(path)
        return running.optimizer_state()


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda config: config.kind)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(4, tp=2, cp=2), Layout(4, cp=4)),
        (Layout(4, cp=2), Layout(4, tp=2, cp=2)),
        (SPLIT, Layout(4, cp=2, distributed=True)),
        (Layout(4, cp=4, distributed=True), SPLIT),
    ],
    ids=str,
)
def test_a_checkpoint_holds_whole_tensors_that_any_layout_loads(
    source: Layout, target: Layout, drafter: DFlashConfig, tmp_path: Path
) -> None:
    expected, whole = on_ranks(4, save, source, drafter, str(tmp_path))[0]
    stored = TensorReader(tmp_path).tensors
    for name, shape in drafter.head_shapes().items():
        assert whole[name] == shape
        assert tuple(stored[name].size) == shape
    for state in on_ranks(4, load, target, drafter, str(tmp_path)):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
