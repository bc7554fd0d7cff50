"""A public drafter through Bridge's HuggingFace side, on two tensor-parallel ranks."""

from pathlib import Path

import pytest
import torch

from megatron_splitkv.export import from_zlab, write_drafter
from megatron_splitkv.export.zlab import zlab_shapes
from tests.distributed.jobs import run_job
from tests.drafter.harness import TINY
from tests.recipes.environment import needs_bridge

pytestmark = [pytest.mark.job, needs_bridge]

_COLUMN = ("fc.weight", "linear_q.weight", "linear_kv.weight")
_ROW = ("linear_proj.weight", "linear_fc2.weight")


def _first_half(name: str, whole: torch.Tensor) -> torch.Tensor:
    """What rank 0 of 2 holds of a tensor in Megatron's layout."""
    if name.endswith("linear_fc1.weight"):  # half of the gate, half of the up projection
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(2)[0], up.chunk(2)[0]])
    if name.endswith(_COLUMN):
        return whole.chunk(2, dim=0)[0]
    return whole.chunk(2, dim=1)[0] if name.endswith(_ROW) else whole


def test_bridge_places_and_returns_every_tensor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    public = {
        name: torch.randn(shape, generator=generator) for name, shape in zlab_shapes(TINY).items()
    }
    write_drafter(tmp_path / "public", public, TINY)
    run_job(2, [str(tmp_path)], program=("-m", "tests.recipes.hf_job")).check()
    result = torch.load(tmp_path / "result.pt")
    megatron = from_zlab(public, TINY)
    assert result["shard"].keys() == megatron.keys()
    for name, shard in result["shard"].items():
        assert torch.equal(shard, _first_half(name, megatron[name])), name
    assert result["out"].keys() == public.keys()
    assert all(torch.equal(result["out"][name], public[name]) for name in public)
