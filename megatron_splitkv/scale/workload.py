"""The micro-batch that is timed: fixed-length samples with anchors drawn in the response."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout

BLOCK_SIZE = 16
PROMPT_SHARE = 0.25  # prompt : response = 1 : 3
K = 1024


@dataclass(frozen=True)
class Workload:
    """One training step on P ranks; data parallelism is one.

    Args:
        samples: b, documents packed into the micro-batch.
        sample_context: context rows of a sample.
        sample_queries: query rows of a sample, a multiple of the block size.
        cp_size: P.

    Raises:
        ConfigError: a size that no step has.
    """

    samples: int
    sample_context: int
    sample_queries: int
    cp_size: int

    def __post_init__(self) -> None:
        if min(self.samples, self.sample_context, self.sample_queries, self.cp_size) < 1:
            raise ConfigError(f"{self}: every size must be at least 1")
        if self.sample_queries % BLOCK_SIZE:
            raise ConfigError(
                f"{self.sample_queries} query rows a sample are not whole blocks of {BLOCK_SIZE}"
            )
        if self.anchors > self.sample_context - self.first_anchor:
            raise ConfigError(f"{self.anchors} anchors do not fit a sample's response; use fewer")

    @property
    def context_rows(self) -> int:
        """S, packed context rows over all ranks."""
        return self.samples * self.sample_context

    @property
    def query_rows(self) -> int:
        """Q, packed query rows over all ranks."""
        return self.samples * self.sample_queries

    @property
    def anchors(self) -> int:
        """Anchors of a sample."""
        return self.sample_queries // BLOCK_SIZE

    @property
    def first_anchor(self) -> int:
        """Position in a sample at which its response begins."""
        return int(PROMPT_SHARE * self.sample_context)

    def layout(self) -> BlockLayout:
        """The draft blocks, the same at every P."""
        return _layout(self.samples, self.sample_context, self.anchors, self.first_anchor)


@lru_cache(maxsize=64)
def _layout(samples: int, length: int, anchors: int, first: int) -> BlockLayout:
    generator = np.random.default_rng(0)
    positions = [
        np.sort(generator.choice(length - first, anchors, replace=False)) + first
        for _ in range(samples)
    ]
    starts = np.arange(samples, dtype=np.int64) * length
    return BlockLayout(
        (np.stack(positions) + starts[:, None]).ravel(),
        np.repeat(starts, anchors),
        np.ones(samples * anchors, dtype=np.bool_),
        BLOCK_SIZE,
    )


def weak(cp_size: int) -> Workload:
    """The paper's weak scaling: 128k context rows a rank, Q = 64k, b = 8 (Section 5.2)."""
    return Workload(8, 16 * K * cp_size, 8 * K, cp_size)


def strong(cp_size: int) -> Workload:
    """The paper's strong scaling: 4 samples of 256k, Q = 32k (Section 5.3)."""
    return Workload(4, 256 * K, 8 * K, cp_size)


def ratio(context_per_query: int) -> Workload:
    """The paper's ablation: 32 ranks, 128k a sample, Q = 64k, S = Q x ratio (Section 5.4).

    Args:
        context_per_query: S / Q: 4, 8, 16 or 32.
    """
    samples = context_per_query // 2
    return Workload(samples, 128 * K, 64 * K // samples, 32)
