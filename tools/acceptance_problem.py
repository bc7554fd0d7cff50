"""Problems for the acceptance of a device: one rank's share of a workload, and the truth about it.

Truth is the naive kernel in fp64: whole for small shapes, some rows and some keys of large ones.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels import Kernel, Request, naive
from megatron_splitkv.attention.merge import delta_carrier, row_delta
from megatron_splitkv.data.anchors import select_anchors
from megatron_splitkv.plan import ContextPlan, Rectangles, Staircase, build_plan

NAMES = ("out", "lse", "dq", "dk", "dv")
SAMPLE = 64  # rows, and keys, of a large shape that are held against fp64


@dataclass(frozen=True)
class Shape:
    """One rank's share of a packed micro-batch.

    Args:
        name: of the section.
        documents: packed documents of equal length.
        length: of each.
        anchors: blocks a document.
        cp_size: P; rank 0's share is computed.
        heads: n_q.
        kv_heads: n_kv.
        width: d.
        block_size: B.
    """

    name: str
    documents: int
    length: int
    anchors: int
    cp_size: int
    heads: int
    kv_heads: int
    width: int
    block_size: int = 16

    def plan(self) -> ContextPlan:
        """A quarter of every document is a prompt without anchors."""
        cu_seqlens = np.arange(self.documents + 1) * self.length
        mask = (np.arange(cu_seqlens[-1]) % self.length) >= self.length // 4
        layout = select_anchors(
            mask,
            cu_seqlens,
            num_anchors=self.anchors,
            block_size=self.block_size,
            seed=0,
            step=0,
            sample_ids=np.arange(self.documents),
        )
        return build_plan(layout, int(cu_seqlens[-1]), self.cp_size)

    def request(self, dtype: torch.dtype) -> Request:
        """For the rules of the kernels."""
        return Request(dtype, self.heads, self.kv_heads, self.width)


HEADS = {"35b-a3b": (32, 4), "27b": (32, 8)}
PAPER = [
    Shape(f"{model}-p{ranks}", 4, 262144, 512, ranks, *heads, 128)
    for model, heads in HEADS.items()
    for ranks in (8, 64)
]
SMALL = [
    Shape("gqa", 3, 2048, 40, 2, 32, 4, 128),
    Shape("mha", 2, 4096, 32, 1, 8, 8, 64),
    Shape("mqa", 1, 3000, 64, 3, 8, 1, 128),
]
TINY = [replace(s, length=256, anchors=6, heads=s.kv_heads * 2, width=16) for s in SMALL]


@dataclass(frozen=True)
class Problem:
    """Tensors of a shape on a device.

    Shape:
        q, grad_out ``[Q, n_q, d]``; k, v ``[K, n_kv, d]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    scale: float

    @classmethod
    def draw(
        cls, shape: Shape, plan: ContextPlan, device: torch.device, dtype: torch.dtype, size: float
    ) -> "Problem":
        generator = torch.Generator(device).manual_seed(0)

        def rows(count: int, heads: int) -> torch.Tensor:
            x = torch.randn(count, heads, shape.width, generator=generator, device=device)
            return x.to(dtype)

        queries, keys = plan.num_blocks * plan.block_size, plan.num_rows(0)
        q, grad_out = rows(queries, shape.heads) * size, rows(queries, shape.heads)
        return cls(
            q, rows(keys, shape.kv_heads), rows(keys, shape.kv_heads), grad_out, shape.width**-0.5
        )

    def solve(self, kernel: Kernel, staircase: Staircase) -> tuple[torch.Tensor, ...]:
        """Out, lse, dq, dk and dv as one rank alone has them."""
        out, lse = kernel.forward(self.q, self.k, self.v, staircase, self.scale)
        return out, lse, *self.backward(kernel, staircase, out, lse)

    def backward(
        self, kernel: Kernel, staircase: Staircase, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        carrier = delta_carrier(self.grad_out, row_delta(self.grad_out, out))
        return kernel.backward(
            self.grad_out, self.q, self.k, self.v, carrier, lse, staircase, self.scale
        )


def whole_truth(problem: Problem, staircase: Staircase) -> list[torch.Tensor]:
    """fp64 results of the naive kernel, one key head at a time to bound its memory."""
    group = problem.q.shape[1] // problem.k.shape[1]
    parts = []
    for head in range(problem.k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        part = Problem(
            problem.q[:, heads].double(),
            problem.k[:, head : head + 1].double(),
            problem.v[:, head : head + 1].double(),
            problem.grad_out[:, heads].double(),
            problem.scale,
        )
        parts.append(part.solve(naive, staircase))
    return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]


def sampled_errors(
    problem: Problem, staircase: Staircase, found: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Errors of some rows' out, lse and dq and of some keys' dk and dv, against fp64."""
    out, lse, dq, dk, dv = found
    sees = np.flatnonzero(staircase.row_end > staircase.row_start)
    rows = sees[np.linspace(0, sees.size - 1, SAMPLE).astype(np.int64)]
    on_device = torch.from_numpy(rows).to(problem.q.device)
    some_rows = replace(problem, q=problem.q[on_device], grad_out=problem.grad_out[on_device])
    ranges = visibility(staircase.row_start[rows], staircase.row_end[rows])
    true_out, true_lse, true_dq, _, _ = whole_truth(some_rows, ranges)
    # Keys in the middle of what the first sampled row sees, which later rows of it see too.
    middle = int(staircase.row_start[rows[0]] + staircase.row_end[rows[0]]) // 2
    keys = slice(middle, min(middle + SAMPLE, problem.k.shape[0]))
    start, end = (
        np.clip(x - keys.start, 0, keys.stop - keys.start)
        for x in (staircase.row_start, staircase.row_end)
    )
    group = problem.q.shape[1] // problem.k.shape[1]
    delta = row_delta(problem.grad_out, out).double()
    gradients = []
    for head in range(problem.k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        grad_out = problem.grad_out[:, heads].double()
        gradients.append(
            naive.backward(
                grad_out,
                problem.q[:, heads].double(),
                problem.k[keys, head : head + 1].double(),
                problem.v[keys, head : head + 1].double(),
                delta_carrier(grad_out, delta[:, heads]),
                lse[:, heads].double(),
                visibility(start, end),
                problem.scale,
            )[1:]
        )
    true_dk, true_dv = (torch.cat(x, dim=1) for x in zip(*gradients, strict=True))
    return relative_errors(
        (out[on_device], lse[on_device], dq[on_device], dk[keys], dv[keys]),
        (true_out, true_lse, true_dq, true_dk, true_dv),
    )


def visibility(start: NDArray[np.int64], end: NDArray[np.int64]) -> Staircase:
    """Row ranges without rectangles: all that the naive kernel reads."""
    nothing = np.empty(0, dtype=np.int64)
    empty = Rectangles(nothing, nothing, nothing, nothing)
    pairs = int((end - start).sum())
    return Staircase([], empty, start, end, 1, pairs, pairs)


def sdpa(problem: Problem, staircase: Staircase) -> tuple[torch.Tensor | None, ...]:
    """What torch's attention under a dense mask gives; it has no log-sum-exp."""
    device = problem.q.device
    start, end = (torch.from_numpy(x).to(device) for x in (staircase.row_start, staircase.row_end))
    key = torch.arange(problem.k.shape[0], device=device)
    mask = (start[:, None] <= key) & (key < end[:, None])
    sees = mask.any(dim=1)
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = attend(leaves, mask | ~sees[:, None], problem.scale)  # no answer for empty rows
    out = out[0].transpose(0, 1) * sees[:, None, None]
    return out, None, *torch.autograd.grad(out, leaves, problem.grad_out)


def attend(leaves: list[torch.Tensor], mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in leaves)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def relative_errors(
    found: tuple[torch.Tensor | None, ...], truth: list[torch.Tensor] | tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Norm of the difference over that of the truth, NaN where not finite alike."""
    errors = {}
    for name, x, true in zip(NAMES, found, truth, strict=True):
        if x is None:
            continue
        alike = torch.equal(x.isfinite(), true.isfinite())
        x, true = (t.detach().double().nan_to_num(0.0, posinf=0.0, neginf=0.0) for t in (x, true))
        size = float(true.norm())
        errors[name] = float((x - true).norm()) / (size or 1.0) if alike else float("nan")
    return errors
