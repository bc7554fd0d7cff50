"""`splitkv bench step`: the strategies side by side."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError

if TYPE_CHECKING:
    from megatron_splitkv.bench.step import StepBenchmark

PASSED = "none"
_MOST_RANKS, _MOST_CONTEXT, _MOST_QUERIES = 64, 1 << 24, 1 << 20


def add_step(benchmarks: Any) -> argparse.ArgumentParser:
    """Add the parser."""
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        "step",
        help="every strategy's bytes, calls, memory, balance and time on the same micro-batch",
        description="One attention layer of a published drafter, forward and backward, under split-"
        "KV and every other strategy. Without a launcher: gloo processes of this machine, a "
        "smaller layer, and times with a core for each rank and the links of a machine. Under "
        "torchrun on GPUs: NCCL, the whole layer, and the time that passes.",
    )
    parser.add_argument(
        "--drafter",
        default="qwen3.5-35b-a3b",
        metavar="NAME",
        help="a published drafter (default: %(default)s)",
    )
    parser.add_argument(
        "--shrink",
        type=int,
        metavar="N",
        help="divide its heads and their width by N (default: 4; 1 on GPUs)",
    )
    parser.add_argument(
        "--ranks", metavar="LIST", help="gloo processes (default: 4; the launcher's under torchrun)"
    )
    for option, default, text in (
        ("--contexts", "4096,16384,32768", "context rows of all ranks"),
        ("--queries", "1024", "draft rows of all ranks"),
    ):
        parser.add_argument(
            option, default=default, metavar="LIST", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--links",
        metavar="NAME|FILE",
        help="links to inject: a preset, a file of `splitkv bench links`, or 'none' for the time "
        "that passes (default: nvlink-400g; none on GPUs)",
    )
    for option, number, text in (
        ("--ranks-per-node", 2, "ranks on one node of the injected machine"),
        ("--repeats", 3, "timed steps of each method"),
        ("--samples", 1, "documents that are packed"),
        ("--seed", 0, "of anchors, features and weights"),
    ):
        parser.add_argument(
            option, type=int, default=number, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--warmups", type=int, metavar="N", help="untimed steps of each (default: 1; 5 on GPUs)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.set_defaults(run_benchmark=run_step)
    return parser


def run_step(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], Callable[[], None], Callable[[str], list[Path]]]:
    """Run it; see `bench.Outcome`. Of a launched group only rank 0 shows and writes anything.

    Raises:
        ConfigError: of a launched group on rank 0; the others leave with the same code in silence.
    """
    from megatron_splitkv.bench.ranks import launched_rank
    from megatron_splitkv.bench.report import reported
    from megatron_splitkv.bench.step_report import draw_steps, print_steps

    leads = launched_rank() == 0
    try:
        result = _measure(args, leads)
    except ConfigError:
        if leads:
            raise
        raise SystemExit(2) from None
    if not leads:
        args.json, args.output = False, None
        return {}, lambda: None, lambda folder: []
    return reported("step", result, print_steps, draw_steps)


def _measure(args: argparse.Namespace, leads: bool) -> "StepBenchmark":
    import torch

    from megatron_splitkv.bench.ranks import launched_size
    from megatron_splitkv.bench.step import bench_step, check_effort
    from megatron_splitkv.bench.step_shape import StepShape
    from megatron_splitkv.bench.step_time import small_nodes
    from megatron_splitkv.cli.bench import parse_numbers
    from megatron_splitkv.comm.links import links_from
    from megatron_splitkv.comm.topology import launched_ranks_per_node

    launched = launched_size() > 1
    on_gpus = launched and torch.cuda.is_available()
    wanted = (PASSED if on_gpus else "nvlink-400g") if args.links is None else args.links
    if on_gpus and wanted != PASSED:
        raise ConfigError(f"--links {wanted} is for CPU ranks; on GPUs time is what passes")
    links = None if wanted == PASSED else small_nodes(links_from(wanted), args.ranks_per_node)
    shape = StepShape(
        drafter=args.drafter,
        shrink=(1 if on_gpus else 4) if args.shrink is None else args.shrink,
        samples=args.samples,
        dtype=args.dtype,
        seed=args.seed,
        ranks_per_node=launched_ranks_per_node() if links is None else links.ranks_per_node,
    )
    shapes = [
        replace(shape, context=context, queries=queries)
        for queries in parse_numbers("--queries", args.queries, _MOST_QUERIES)
        for context in parse_numbers("--contexts", args.contexts, _MOST_CONTEXT)
    ]
    usual = str(launched_size() if launched else 4)
    ranks = parse_numbers("--ranks", args.ranks or usual, None if launched else _MOST_RANKS)
    warmups = (5 if on_gpus else 1) if args.warmups is None else args.warmups
    check_effort(shapes, ranks, warmups, args.repeats)
    with stage_bars(quiet=args.json or not leads) as stages, stages.stage("steps") as progress:
        return bench_step(
            shapes,
            ranks=ranks,
            links=links,
            warmups=warmups,
            repeats=args.repeats,
            progress=progress,
        )
