"""The `te` kernel on the real functions; skipped where there is no device for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import Kernel, find_kernel, naive
from megatron_splitkv.attention.kernels.rules import Request
from megatron_splitkv.attention.merge import delta_carrier, row_delta
from megatron_splitkv.plan import Staircase, build_staircase
from megatron_splitkv.testing import relative_error

pytestmark = pytest.mark.gpu
SCALE = 0.09


def kernel_for(request: Request) -> Kernel:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = find_kernel("te", torch.device("cuda"), request)
    if isinstance(found, str):
        if "self-test" in found:
            pytest.fail(found)
        pytest.skip(f"kernel 'te': {found}")
    return found


def staircase_of(num_blocks: int, num_keys: int) -> Staircase:
    """Two documents with gaps before, between and behind what is seen."""
    half = num_keys // 2
    ends = np.sort(np.random.default_rng(0).integers(1, half - 100, (2, num_blocks // 2)), axis=1)
    start = np.repeat([40, half + 40], num_blocks // 2)
    return build_staircase(start, start + ends.ravel(), 16)


def tensors_of(request: Request, staircase: Staircase, num_keys: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, request.width)
        x = torch.randn(shape, device="cuda", generator=generator)
        return x.to(request.dtype)

    q, grad_out = (draw(staircase.num_rows, request.num_heads) for _ in range(2))
    return [
        q,
        draw(num_keys, request.num_key_heads),
        draw(num_keys, request.num_key_heads),
        grad_out,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_key_heads", [8, 2, 1])
@pytest.mark.parametrize("width", [64, 128])
def test_equals_naive(dtype: torch.dtype, num_key_heads: int, width: int) -> None:
    request = Request(dtype, 8, num_key_heads, width)
    kernel, staircase = kernel_for(request), staircase_of(64, 3000)
    q, k, v, grad_out = tensors_of(request, staircase, 3000)
    true_out, true_lse = naive.forward(q, k, v, staircase, SCALE)
    lse = torch.logaddexp(true_lse, true_lse - 0.3)
    carrier = delta_carrier(grad_out, row_delta(grad_out, true_out))
    true_grads = naive.backward(grad_out, q, k, v, carrier, lse, staircase, SCALE)
    out, own_lse = kernel.forward(q, k, v, staircase, SCALE)
    grads = kernel.backward(grad_out, q, k, v, carrier, lse, staircase, SCALE)
    assert relative_error(own_lse, true_lse) < 1e-5
    for found, expected in zip((out, *grads), (true_out, *true_grads), strict=True):
        assert relative_error(found, expected) < torch.finfo(dtype).eps


def test_waits_for_nothing_once_it_is_laid_out() -> None:
    request = Request(torch.bfloat16, 8, 2, 64)
    kernel, staircase = kernel_for(request), staircase_of(64, 3000)
    q, k, v, grad_out = tensors_of(request, staircase, 3000)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out, lse = kernel.forward(q, k, v, staircase, SCALE)
            carrier = out.to(q.dtype)
            kernel.backward(grad_out, q, k, v, carrier, lse, staircase, SCALE)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_repeats_bit_for_bit_when_determinism_is_asked_for() -> None:
    request = Request(torch.bfloat16, 8, 2, 64)
    kernel_for(request)
    torch.use_deterministic_algorithms(True)
    try:
        kernel, staircase = kernel_for(replace(request, deterministic=True)), staircase_of(64, 3000)
        q, k, v, grad_out = tensors_of(request, staircase, 3000)
        runs = []
        for _ in range(2):
            out, lse = kernel.forward(q, k, v, staircase, SCALE)
            grads = kernel.backward(grad_out, q, k, v, out.to(q.dtype), lse, staircase, SCALE)
            runs.append([out, lse, *grads])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
