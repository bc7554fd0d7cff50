"""`splitkv bench`: our kernels beside what a user would call without them, on the same inputs."""

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_splitkv.cli.progress import stage_bars


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser, with one subcommand a benchmark."""
    parser = subparsers.add_parser(
        "bench",
        help="time our kernels against torch's on the same inputs",
        description="Benchmarks; each prints a table, and with --output writes JSON and a picture.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    _add_attention(benchmarks)


def _add_attention(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "attention",
        help="the cpu kernel, torch under a dense mask, and the ideal",
        description="Draft blocks that see a context up to their anchors: CPU- and wall seconds, "
        "forward and backward, of our cpu kernel, of torch's attention under a dense mask and "
        "without one; the ideal is the latter times the share of visible pairs.",
    )
    for option, default, text in (
        ("--queries", 2048, "query rows, a multiple of the block size"),
        ("--context", 8192, "context rows"),
        ("--heads", 8, "query heads"),
        ("--kv-heads", None, "key-value heads (default: as many)"),
        ("--head-dim", 64, "width of a head"),
        ("--block-size", 16, "query rows a draft block"),
        ("--threads", 1, "threads of torch"),
        ("--repeats", 7, "timed runs of each method"),
        ("--seed", 0, "of anchors and tensors"),
    ):
        help_text = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--density",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the query-key pairs to be visible: anchors are drawn uniformly around that "
        "share of the context (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float64")
    parser.add_argument("--output", metavar="DIR", help="write attention.json and attention.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print it, write what was asked for."""
    from megatron_splitkv.bench import (
        AttentionShape,
        bench_attention,
        print_benchmark,
        write_benchmark,
    )

    shape = AttentionShape(
        queries=args.queries,
        context=args.context,
        heads=args.heads,
        kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
        head_dim=args.head_dim,
        block_size=args.block_size,
        density=args.density,
        dtype=args.dtype,
        seed=args.seed,
    )
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)  # fails before the work
    with stage_bars(quiet=args.json) as stages, stages.stage("attention") as progress:
        result = bench_attention(
            shape, threads=args.threads, repeats=args.repeats, progress=progress
        )
    if args.json:
        print(json.dumps(result.to_json()))
    else:
        print_benchmark(result)
    files = write_benchmark(result, args.output) if args.output else []
    if files and not args.json:
        print("written: " + ", ".join(str(file) for file in files))
    return 0
