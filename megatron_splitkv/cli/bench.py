"""`splitkv bench`: ours beside what a user would have without it, on the same inputs."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_splitkv.cli.bench_links import add_links
from megatron_splitkv.cli.bench_quality import add_quality
from megatron_splitkv.cli.bench_step import add_step
from megatron_splitkv.cli.bench_store import add_store
from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError

# What a benchmark found: for a program, for a person, and a way to write both into a folder.
Outcome = tuple[dict[str, Any], Callable[[], None], Callable[[str], list[Path]]]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser, with one subcommand a benchmark."""
    parser = subparsers.add_parser(
        "bench",
        help="measure kernels, plans and steps on this machine",
        description="Benchmarks; each prints a table, and with --output writes JSON and a picture.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    _add_attention(benchmarks)
    _add_plan(benchmarks)
    _add_balance(benchmarks)
    add_links(benchmarks, _add_outputs)
    _add_outputs(add_step(benchmarks), "step")
    add_quality(benchmarks, _add_outputs)
    add_store(benchmarks, _add_outputs)


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
    _add_outputs(parser, "attention")
    parser.set_defaults(run_benchmark=_run_attention)


def _add_plan(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "plan",
        help="how even plans are and how long they take, as in the paper's Figures 9 and 10",
        description="Plans the paper's workload (four samples, 512 anchors each, a quarter of each "
        "without supervision) under every strategy: contexts on the first number of ranks, and "
        "ranks at the last context; then times how planning grows. The paper's numbers stand "
        "beside; its times are of another machine and are never set against these.",
    )
    parser.add_argument(
        "--contexts",
        default="16384,32768,65536,131072,262144",
        metavar="LIST",
        help="tokens a sample (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", default="8,16,32,64", metavar="LIST", help="default: %(default)s"
    )
    for option, default, text in (
        ("--chunks-per-rank", 16, "chunks a rank, of all strategies alike"),
        ("--seeds", 20, "draws of anchors"),
        ("--scale-to", 1024, "ranks up to which planning time is followed"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    _add_outputs(parser, "plan")
    parser.set_defaults(run_benchmark=_run_plan)


def _add_balance(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "balance",
        help="what balance is worth in training steps, as in the paper's Appendix B",
        description="Trains steps of a small drafter on gloo ranks under every strategy in turn "
        "and prints the slowest rank's CPU time, the speed-up over contiguous rows with its "
        "interval, with plans made ahead and in the step, and what the imbalance of the work "
        "alone says.",
    )
    parser.add_argument("--ranks", default="2,4", metavar="LIST", help="default: %(default)s")
    for option, default, text in (
        ("--repeats", 6, "timed steps of each strategy"),
        ("--samples", 1, "documents a micro-batch"),
        ("--context", 32768, "tokens of each"),
        ("--anchors", 256, "draft blocks of each"),
        ("--block-size", 16, "slots of a block"),
        ("--layers", 1, "of the drafter"),
        ("--hidden-size", 128, "of the drafter, a multiple of 128"),
        ("--chunks-per-rank", None, "default: by rule"),
        ("--seed", 0, "of anchors and weights"),
    ):
        help_text = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    _add_outputs(parser, "balance")
    parser.set_defaults(run_benchmark=_run_balance)


def _add_outputs(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--output", metavar="DIR", help=f"write {name}.json and {name}.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print it, write what was asked for."""
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)  # fails before the work
    content, show, write = args.run_benchmark(args)
    if args.json:
        print(json.dumps(content))
    else:
        show()
    files = write(args.output) if args.output else []
    if files and not args.json:
        print("written: " + ", ".join(str(file) for file in files))
    return 0


def _run_attention(args: argparse.Namespace) -> Outcome:
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
    with stage_bars(quiet=args.json) as stages, stages.stage("attention") as progress:
        result = bench_attention(
            shape, threads=args.threads, repeats=args.repeats, progress=progress
        )
    return (
        result.to_json(),
        lambda: print_benchmark(result),
        lambda folder: write_benchmark(result, folder),
    )


def _run_plan(args: argparse.Namespace) -> Outcome:
    from megatron_splitkv.bench.planning import PlanningShape, bench_planning
    from megatron_splitkv.bench.planning_report import draw_planning, print_planning
    from megatron_splitkv.bench.report import reported

    shape = PlanningShape(
        contexts=parse_numbers("--contexts", args.contexts),
        ranks=parse_numbers("--ranks", args.ranks),
        chunks_per_rank=args.chunks_per_rank,
        seeds=args.seeds,
        scale_to=args.scale_to,
    )
    with stage_bars(quiet=args.json) as stages, stages.stage("plans") as progress:
        result = bench_planning(shape, progress)
    return reported("plan", result, print_planning, draw_planning)


def _run_balance(args: argparse.Namespace) -> Outcome:
    from megatron_splitkv.bench.balance import BalanceShape, bench_balance
    from megatron_splitkv.bench.balance_report import draw_balance, print_balance
    from megatron_splitkv.bench.report import reported

    shape = BalanceShape(
        ranks=parse_numbers("--ranks", args.ranks),
        repeats=args.repeats,
        samples=args.samples,
        context=args.context,
        anchors=args.anchors,
        block_size=args.block_size,
        layers=args.layers,
        hidden_size=args.hidden_size,
        chunks_per_rank=args.chunks_per_rank,
        seed=args.seed,
    )
    with stage_bars(quiet=args.json) as stages, stages.stage("steps") as progress:
        result = bench_balance(shape, progress)
    return reported("balance", result, print_balance, draw_balance)


def parse_numbers(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    """Whole numbers from '8,16,32'.

    Args:
        option: whose they are.
        text: what the user typed.
        most: the largest allowed; None for any.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[+-]?[0-9]{1,18}", part) for part in parts):
        raise ConfigError(f"{option} {text!r} is not a list of numbers; write '8,16,32'")
    numbers = tuple(int(part) for part in parts)
    if most is not None and max(numbers) > most:
        raise ConfigError(f"{option} {text}: each may be at most {most:,}")
    return numbers
