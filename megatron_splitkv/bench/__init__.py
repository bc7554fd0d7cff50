"""Benchmarks: the same inputs, the same run, ours beside what a user would call without it."""

from megatron_splitkv.bench.attention import AttentionBenchmark, AttentionShape, bench_attention
from megatron_splitkv.bench.report import draw_benchmark, print_benchmark, write_benchmark

__all__ = [
    "AttentionBenchmark",
    "AttentionShape",
    "bench_attention",
    "draw_benchmark",
    "print_benchmark",
    "write_benchmark",
]
