"""Local attention of draft blocks on a CPU: our kernel, torch under a dense mask, and the ideal.

The ideal is what torch's attention without a mask takes for all query-key pairs, times the share of
pairs that are visible: no kernel of torch's speed can do better. A dense mask computes all pairs.

Shape legend: Q query rows, S context rows, n_q and n_kv heads, d head width.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels import cpu
from megatron_splitkv.attention.kernels.cpu_tiles import tiles_of
from megatron_splitkv.bench.timing import (
    CLOCKS,
    PHASES,
    Method,
    Seconds,
    Spread,
    measure_interleaved,
)
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import Staircase, build_staircase
from megatron_splitkv.testing import relative_error

OURS, MASKED, UNMASKED, IDEAL = "cpu", "dense_mask", "unmasked", "ideal"
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class AttentionShape:
    """Blocks of one document that see its context up to their anchors.

    Args:
        queries: Q, a multiple of `block_size`.
        context: S.
        heads: n_q.
        kv_heads: n_kv.
        head_dim: d.
        block_size: query rows a block.
        density: share of visible query-key pairs that the random anchors are drawn for.
        dtype: one of `DTYPES`.
        seed: of anchors and tensors.
    """

    queries: int = 2048
    context: int = 8192
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    block_size: int = 16
    density: float = 0.5
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "context", "heads", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")
        if self.queries % self.block_size:
            raise ConfigError(
                f"{self.queries} queries are not a multiple of the block size {self.block_size}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads do not divide among {self.kv_heads} key-value heads"
            )
        if not 0 < self.density <= 1:
            raise ConfigError(f"density {self.density} must be in (0, 1]")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not known; use {', '.join(DTYPES)}")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} must not be negative")

    def anchors(self) -> NDArray[np.int64]:
        """Sorted anchors: one drawn from each of equal stretches, whose mean is `density`.

        Shape:
            int64[Q / block_size], each in [1, S].
        """
        count = self.queries // self.block_size
        low = max(0.0, 2 * self.density - 1)
        high = min(1.0, 2 * self.density)
        drawn = (np.arange(count) + np.random.default_rng(self.seed).random(count)) / count
        anchors = np.rint(self.context * (low + (high - low) * drawn)).astype(np.int64)
        return anchors.clip(1, self.context)


@dataclass(frozen=True)
class AttentionBenchmark:
    """Times of the three methods, and what they computed.

    Args:
        shape: the problem.
        threads: of torch.
        seconds: by method, measured.
        needed_pairs: visible query-key pairs.
        executed_pairs: pairs that our kernel computed.
        plan_ms: milliseconds to cut the staircase and lay out its tiles, once for all layers.
        difference: largest relative difference of output and gradients, ours to the dense mask's.
    """

    shape: AttentionShape
    threads: int
    seconds: dict[str, Seconds]
    needed_pairs: int
    executed_pairs: int
    plan_ms: float
    difference: float

    @property
    def density(self) -> float:
        """Share of visible pairs."""
        return self.needed_pairs / (self.shape.queries * self.shape.context)

    @property
    def mask_bytes(self) -> int:
        """What the dense mask occupies; our kernel has none."""
        return self.shape.queries * self.shape.context * _dtype(self.shape).itemsize

    def values(self, method: str, phase: str, clock: str = "cpu") -> NDArray[np.float64]:
        """Seconds of every repeat; of the ideal, from the unmasked run of the same repeat."""
        if method == IDEAL:
            return self.seconds[UNMASKED].of(phase, clock) * self.density
        return self.seconds[method].of(phase, clock)

    def ratio(self, method: str, base: str, phase: str, clock: str = "cpu") -> Spread:
        """Time of one method over another's in the same repeat."""
        return Spread.of(self.values(method, phase, clock) / self.values(base, phase, clock))

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers; spreads are median, low and high over the repeats."""
        return {
            "benchmark": "attention",
            "shape": asdict(self.shape),
            "threads": self.threads,
            "torch": torch.__version__,
            "repeats": int(self.seconds[OURS].values.shape[0]),
            "density": self.density,
            "needed_pairs": self.needed_pairs,
            "executed_pairs": self.executed_pairs,
            "executed_over_needed": self.executed_pairs / self.needed_pairs,
            "mask_bytes": self.mask_bytes,
            "plan_ms": self.plan_ms,
            "max_relative_difference": self.difference,
            "seconds": {
                method: {
                    clock: {
                        phase: asdict(Spread.of(self.values(method, phase, clock)))
                        for phase in PHASES
                    }
                    for clock in CLOCKS
                }
                for method in (MASKED, UNMASKED, OURS, IDEAL)
            },
            "ratios": {
                f"{OURS}_over_{base}": {
                    phase: asdict(self.ratio(OURS, base, phase)) for phase in PHASES
                }
                for base in (MASKED, IDEAL)
            },
        }


def bench_attention(
    shape: AttentionShape,
    *,
    threads: int = 1,
    repeats: int = 7,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AttentionBenchmark:
    """Run and time the three methods on the same inputs in this process.

    Args:
        shape: the problem.
        threads: of torch while it runs.
        repeats: timed runs of each method.
        progress: called with (runs done, runs in all).

    Raises:
        ConfigError: no repeats or threads.
    """
    if repeats < 1 or threads < 1:
        raise ConfigError(f"repeats {repeats} and threads {threads} must be at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _bench(shape, threads, repeats, progress)
    finally:
        torch.set_num_threads(before)


def _bench(
    shape: AttentionShape, threads: int, repeats: int, progress: Callable[[int, int], None]
) -> AttentionBenchmark:
    anchors = shape.anchors()
    inputs = _Inputs.draw(shape)
    methods: dict[str, Method] = {
        MASKED: _Sdpa(inputs, _additive_mask(shape, anchors)),
        UNMASKED: _Sdpa(inputs, None),
        OURS: _Kernel(inputs, staircase := _staircase(anchors, shape.block_size)),
    }
    difference = max(
        relative_error(ours, theirs)
        for ours, theirs in zip(_results(methods[OURS]), _results(methods[MASKED]), strict=True)
    )
    return AttentionBenchmark(
        shape=shape,
        threads=threads,
        seconds=measure_interleaved(methods, repeats, progress),
        needed_pairs=staircase.needed_pairs,
        executed_pairs=staircase.executed_pairs,
        plan_ms=1e3 * min(_planning_seconds(anchors, shape.block_size) for _ in range(5)),
        difference=difference,
    )


@dataclass(frozen=True)
class _Inputs:
    """Shape: q and grad_out ``[Q, n_q, d]``, k and v ``[S, n_kv, d]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    softmax_scale: float

    @classmethod
    def draw(cls, shape: AttentionShape) -> "_Inputs":
        generator = torch.Generator().manual_seed(shape.seed)

        def rows(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, shape.head_dim, generator=generator).to(_dtype(shape))

        return cls(
            rows(shape.queries, shape.heads),
            rows(shape.context, shape.kv_heads),
            rows(shape.context, shape.kv_heads),
            rows(shape.queries, shape.heads),
            1 / math.sqrt(shape.head_dim),
        )


@dataclass(frozen=True)
class _Kernel:
    """Our kernel, which has its gradients from (out, lse) and no autograd."""

    inputs: _Inputs
    staircase: Staircase

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs
        return cpu.forward(x.q, x.k, x.v, self.staircase, x.softmax_scale)

    def backward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, (out, lse) = self.inputs, state
        return cpu.backward(
            x.grad_out, x.q, x.k, x.v, out.to(x.q.dtype), lse, self.staircase, x.softmax_scale
        )


@dataclass(frozen=True)
class _Sdpa:
    """torch's attention; its mask is made beforehand, in the form that it uses without a copy."""

    inputs: _Inputs
    mask: torch.Tensor | None

    def forward(self) -> list[torch.Tensor]:
        x = self.inputs
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        q, k, v = (t.transpose(0, 1)[None] for t in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.mask,
            scale=x.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return [out[0].transpose(0, 1), *leaves]

    def backward(self, state: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out, *leaves = state
        return torch.autograd.grad(out, leaves, self.inputs.grad_out)


def _results(method: Method) -> list[torch.Tensor]:
    """Output and gradients."""
    state = method.forward()
    return [state[0].detach(), *method.backward(state)]


def _staircase(anchors: NDArray[np.int64], block_size: int) -> Staircase:
    return build_staircase(np.zeros_like(anchors), anchors, block_size, cpu.LEAF_LIMITS)


def _planning_seconds(anchors: NDArray[np.int64], block_size: int) -> float:
    begin = time.perf_counter()
    tiles_of(_staircase(anchors, block_size))
    return time.perf_counter() - begin


def _additive_mask(shape: AttentionShape, anchors: NDArray[np.int64]) -> torch.Tensor:
    """``[Q, S]``: 0 where a query row sees a key, -inf elsewhere."""
    end = torch.from_numpy(anchors).repeat_interleave(shape.block_size)[:, None]
    mask = torch.zeros(shape.queries, shape.context, dtype=_dtype(shape))
    return mask.masked_fill_(torch.arange(shape.context) >= end, -torch.inf)


def _dtype(shape: AttentionShape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype
