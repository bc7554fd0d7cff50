"""Does a kernel compute what it should on this very device? One gapped forward and backward.

Some attention engines ignore the starts of ranges, read statistics as something else, or multiply
what lies behind a range by 0 instead of leaving it out. All of that is silent: no version number
tells. So a small problem with gaps is compared with `naive` on the device before a kernel is used.

Source: what the problem provokes is in cudnn-frontend issues 624 (rows behind a range), 737 (starts
ignored) and pytorch issue 196678 (rows whose log-sum-exp is far below 0).
"""

import numpy as np
import torch

from megatron_splitkv.attention.kernels import naive
from megatron_splitkv.attention.kernels.interface import Kernel
from megatron_splitkv.attention.kernels.rules import Request
from megatron_splitkv.attention.merge import delta_carrier, row_delta
from megatron_splitkv.plan import LeafLimits, Staircase, build_staircase

_BLOCK_SIZE = 16
_NAMES = ("output", "log-sum-exp", "dq", "dk", "dv")
_LSE_BOUND = 1e-4  # it is fp32 whatever the dtype


def kernel_failure(
    kernel: Kernel, request: Request, device: torch.device, *, unused_rows: float
) -> str | None:
    """Run a kernel on a small problem with gaps.

    Args:
        kernel: the kernel.
        request: dtype, heads and width.
        device: where to run it.
        unused_rows: what rows hold that see or are seen by nothing: a large number shows whether
            they are read, NaN whether they are multiplied by 0.

    Returns:
        What is wrong; None if nothing is.
    """
    staircase, num_keys = _gapped_staircase()
    q, k, v, grad_out = _tensors(staircase, num_keys, request, device, unused_rows)
    scale = request.width**-0.5
    with torch.no_grad():
        true_out, lse = naive.forward(q, k, v, staircase, scale)
        # The backward gets what a row's softmax sums to over all calls, and a carrier for O.
        carrier = delta_carrier(grad_out, row_delta(grad_out, true_out).nan_to_num(0.0))
        true_grads = naive.backward(grad_out, q, k, v, carrier, lse, staircase, scale)
        try:
            found = [*kernel.forward(q, k, v, staircase, scale)]
            found += kernel.backward(grad_out, q, k, v, carrier, lse, staircase, scale)
        except Exception as error:  # whatever an engine that does not fit raises
            return f"a small call failed: {error!r}"
    bound = 4 * torch.finfo(request.dtype).eps
    for name, a, b in zip(_NAMES, found, (true_out, lse, *true_grads), strict=True):
        difference = _relative_error(a, b)
        allowed = _LSE_BOUND if name == "log-sum-exp" else bound
        if not difference <= allowed:  # NaN too
            return f"its {name} is off by {difference:.1e} in a small call with gaps"
    return None


def _gapped_staircase() -> tuple[Staircase, int]:
    """Three documents, keys between and behind them that nobody sees, a block that sees nothing."""
    first = np.array([3, 20, 64, 65, 128, 150, 151, 300])
    key_start = np.repeat([7, 320, 500, 0], [8, 8, 5, 1])
    key_end = np.concatenate([7 + first, 320 + first // 2, 500 + first[3:], [0]])
    no_leaves = LeafLimits(0, 0, 0)
    return build_staircase(key_start, key_end, _BLOCK_SIZE, no_leaves), 1000


def _tensors(
    staircase: Staircase,
    num_keys: int,
    request: Request,
    device: torch.device,
    unused_rows: float,
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, request.width, generator=generator)

    q, grad_out = (draw(staircase.num_rows, request.num_heads) for _ in range(2))
    k, v = (draw(num_keys, request.num_key_heads) for _ in range(2))
    # In every other block all scores lie around -120, below the logarithm of fp32's least number.
    far_below = (torch.arange(staircase.num_rows) // _BLOCK_SIZE) % 2 == 1
    k[:, :, 0] = 12.0
    q[:, :, 0] = torch.where(far_below, -10.0 * request.width**0.5, 0.0)[:, None]
    sees = torch.from_numpy(staircase.row_end > staircase.row_start)
    seen = torch.zeros(num_keys, dtype=torch.bool)
    for start, end in zip(staircase.row_start, staircase.row_end, strict=True):
        seen[start:end] = True
    for x, used in ((q, sees), (grad_out, sees), (k, seen), (v, seen)):
        x[~used] = unused_rows
    return tuple(x.to(device, request.dtype) for x in (q, k, v, grad_out))


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`; NaN if they are not finite alike."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("nan")
    found, expected = (x.float().nan_to_num(0.0, neginf=0.0) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())
