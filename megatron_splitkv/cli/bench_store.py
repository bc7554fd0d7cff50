"""`splitkv bench store`: the feature store at scale."""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_splitkv.cli.progress import stage_bars


def add_store(benchmarks: Any, add_outputs: Callable[[argparse.ArgumentParser, str], None]) -> None:
    """Add the benchmark's parser.

    Args:
        benchmarks: subparsers of `splitkv bench`.
        add_outputs: adds ``--output`` and ``--json``.
    """
    parser = benchmarks.add_parser(
        "store",
        help="the feature store at scale: build, verify, bytes and memory a rank, rows a second",
        description="Builds a store of log-normal documents with made-up features, verifies it, "
        "and plans and reads one epoch as every rank of a context-parallel group, each in a "
        "process of its own: bytes read, peak memory, and rows a second beside a raw np.memmap on "
        "the same rows. Every row is compared with what was written. The store is removed.",
    )
    for option, default, text in (
        ("--documents", 1000, "documents, of which the median is 1/256 of the longest"),
        ("--max-length", 1 << 18, "tokens of the longest, and of a pack"),
        ("--width", 256, "bfloat16 numbers in a row of features (taps times hidden size)"),
        ("--cp-size", 8, "ranks that share a pack"),
        ("--num-anchors", 64, "draft blocks a document"),
        ("--seed", 0, "of lengths, tokens and anchors"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--folder", metavar="DIR", help="build it on this disk (default: the temporary folder's)"
    )
    add_outputs(parser, "store")
    parser.set_defaults(run_benchmark=run_store)


def run_store(args: argparse.Namespace) -> Any:
    """Run it; see `bench.Outcome`."""
    from megatron_splitkv.bench.report import reported
    from megatron_splitkv.bench.store import bench_store
    from megatron_splitkv.bench.store_case import StoreShape
    from megatron_splitkv.bench.store_report import draw_store, print_store

    shape = StoreShape(
        documents=args.documents,
        max_length=args.max_length,
        width=args.width,
        cp_size=args.cp_size,
        num_anchors=args.num_anchors,
        seed=args.seed,
    )
    with stage_bars(quiet=args.json) as stages:
        result = bench_store(shape, stages.stage, args.folder)
    return reported("store", result, print_store, draw_store)
