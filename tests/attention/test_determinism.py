"""The same inputs give the same bits again, on threads and over ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import cpu, cpu_tiles
from megatron_splitkv.plan import build_staircase
from megatron_splitkv.testing import gloo_pool
from tests.distributed.attention_problem import Problem, solve


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_reruns_are_bitwise_equal(dtype: torch.dtype, threads: int) -> None:
    anchors = np.sort(np.random.default_rng(0).integers(1, 3000, 64)).astype(np.int64)
    staircase = build_staircase(np.zeros_like(anchors), anchors, 16, cpu.LEAF_LIMITS)
    kinds = {type(tile) for tile in cpu_tiles.tiles_of(staircase)}
    assert kinds == {cpu_tiles.ViewTile, cpu_tiles.BatchTile}
    generator = torch.Generator().manual_seed(0)
    q, grad_out = (torch.randn(1024, 4, 32, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(3000, 2, 32, generator=generator).to(dtype) for _ in range(2))

    def run() -> list[torch.Tensor]:
        out, lse = cpu.forward(q, k, v, staircase, 0.2)
        return [out, lse, *cpu.backward(grad_out, q, k, v, out.to(dtype), lse, staircase, 0.2)]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = run()
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("strategy", ["balanced", "balanced-local"])
def test_reruns_over_ranks_are_bitwise_equal(strategy: str) -> None:
    problem = Problem(
        document_lengths=(60, 40, 80),
        anchors=((5, 20, 50, 59), (1, 30), (10, 30, 55, 60, 70)),
        dtype=torch.bfloat16,
        strategy=strategy,
    )
    pool = gloo_pool(4)
    first = pool.run(solve, problem, 4)
    for _ in range(3):
        again = pool.run(solve, replace(problem), 4)
        for one, other in zip(first, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
