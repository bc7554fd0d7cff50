"""The example of a model of one's own: four ranks, one process and a dense mask train alike."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_splitkv.testing import gloo_pool
from tests.distributed.jobs import run_job
from tests.drafter.harness import parallel_state

FILE = Path(__file__).parents[2] / "examples/custom_cross_attention.py"
STEPS = 12


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_cross_attention", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train_every_way() -> dict[str, list[float]]:
    """On the ranks of a pool: losses with four ranks, with one, and with a dense mask."""
    losses = {}
    with parallel_state(1, 4):
        losses["four ranks"] = load_example().train(STEPS)
    with parallel_state(1, 1):
        losses["one process"] = load_example().train(STEPS)
        example = load_example()
        example.SplitKVCoreAttention = dense_attention()  # type: ignore[attr-defined]
        losses["dense mask"] = example.train(STEPS)
    return losses


def dense_attention() -> Any:
    """Megatron's own attention under the plan written out as a mask; keys lie in order."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Dense(DotProductAttention):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs | {"cp_comm_type": None})

        def forward(self, *qkv: Any, packed_seq_params: Any, **_: Any) -> torch.Tensor:
            plan = packed_seq_params.plan
            start, end = (torch.from_numpy(x)[:, None] for x in (plan.key_start, plan.key_end))
            keys = torch.arange(plan.num_keys)
            hidden = (keys < start) | (keys >= end)
            return super().forward(*qkv[:3], hidden[None, None])

    return Dense


def test_it_trains_alike_on_four_ranks_on_one_and_with_a_mask() -> None:
    every_rank = gloo_pool(4).run(train_every_way)
    for found in every_rank:
        expected = found["dense mask"]
        assert expected[-1] < 0.8 * expected[0]  # it learns
        for way in ("one process", "four ranks"):
            assert found[way] == pytest.approx(expected, rel=2e-5), way


@pytest.mark.job
def test_the_command_in_its_docstring() -> None:
    job = run_job(4, [], program=(str(FILE),)).check()
    assert "after 20 steps" in job.output
