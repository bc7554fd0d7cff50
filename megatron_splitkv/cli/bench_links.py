"""`splitkv bench links`: how fast this machine's ranks exchange and compute."""

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_splitkv.cli.progress import stage_bars
from megatron_splitkv.config import ConfigError

if TYPE_CHECKING:
    from megatron_splitkv.bench.links import Effort, LinksBenchmark

_CPU_SIZES = "4096,65536,1048576,8388608"
_GPU_SIZES = "65536,1048576,16777216,268435456"
_MOST_RANKS = 8
_MOST_BYTES = 1 << 30
_SECONDS = 300.0


def add_links(benchmarks: Any, add_outputs: Callable[[argparse.ArgumentParser, str], None]) -> None:
    """Add the benchmark's parser.

    Args:
        benchmarks: subparsers of `splitkv bench`.
        add_outputs: adds ``--output`` and ``--json``.
    """
    parser = benchmarks.add_parser(
        "links",
        help="latency and bandwidth between ranks, for every 'auto' and for `splitkv scale`",
        description="Times all-gather, all-to-all, all-reduce and neighbour hops, inside a node "
        "and across nodes, and what a rank computes; fits one model of the machine, which --save "
        "writes for `--links FILE` in training and `splitkv scale`. On GPUs or several nodes: "
        "torchrun --nnodes N --nproc-per-node M -m megatron_splitkv bench links. Without torchrun "
        "it starts gloo ranks on this machine's CPU.",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks to start without torchrun (default: 2)"
    )
    parser.add_argument(
        "--sizes",
        metavar="LIST",
        help=f"bytes that a rank sends (default: {_CPU_SIZES}; on GPUs {_GPU_SIZES})",
    )
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="timed runs (default: %(default)s)"
    )
    parser.add_argument("--save", metavar="FILE", help="write the model as JSON")
    parser.add_argument("--name", default="measured", help="of the model (default: %(default)s)")
    add_outputs(parser, "links")
    parser.set_defaults(run_benchmark=run_links)


def run_links(args: argparse.Namespace) -> Any:
    """Measure; only rank 0 of a launched group shows and writes anything.

    Raises:
        ConfigError: of a launched group on rank 0; the others leave with the same code in silence.
    """
    launched, rank = int(os.environ.get("WORLD_SIZE", "1")) > 1, int(os.environ.get("RANK", "0"))
    try:
        result = _measure(args, launched, rank)
    except ConfigError:
        if rank:
            raise SystemExit(2) from None
        raise
    if rank:
        args.json, args.output = False, None
        return {}, lambda: None, lambda folder: []
    if args.save:
        result.links.save(args.save)
    from megatron_splitkv.bench.links_report import draw_links, print_links
    from megatron_splitkv.bench.report import reported

    def show(result: "LinksBenchmark") -> None:
        print_links(result)
        if args.save:
            print(f"saved: {args.save}; use it with --links {args.save}")

    return reported("links", result, show, draw_links)


def _measure(args: argparse.Namespace, launched: bool, rank: int) -> "LinksBenchmark":
    import torch

    from megatron_splitkv.bench.links import Effort, measure_links

    on_gpus = launched and torch.cuda.is_available()
    text = args.sizes or (_GPU_SIZES if on_gpus else _CPU_SIZES)
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--sizes {text!r} is not a list of bytes; write {_CPU_SIZES}") from None
    if max(sizes) > _MOST_BYTES and not launched:
        raise ConfigError(f"--sizes {text}: at most {_MOST_BYTES:,} bytes without torchrun")
    effort = Effort(sizes, args.repeats)
    if not args.name:
        raise ConfigError("--name is empty; give the model a name")
    if args.save and (Path(args.save).is_dir() or not Path(args.save).absolute().parent.is_dir()):
        raise ConfigError(f"--save {args.save} is no file in a folder that exists; name one")
    if launched:
        if args.ranks is not None:
            raise ConfigError(
                f"--ranks {args.ranks} is for a run without torchrun, which has started "
                f"{os.environ['WORLD_SIZE']} ranks; drop it"
            )
        return _measure_launched(effort, args.name, quiet=args.json or rank > 0, on_gpus=on_gpus)
    ranks = 2 if args.ranks is None else args.ranks
    if not 2 <= ranks <= _MOST_RANKS:
        raise ConfigError(
            f"--ranks {ranks} must be from 2 to {_MOST_RANKS}; start more with torchrun"
        )
    from megatron_splitkv.testing import GlooPool

    pool = GlooPool(ranks)
    try:
        with stage_bars(quiet=args.json) as stages, stages.stage(f"{ranks} gloo ranks") as progress:
            found: LinksBenchmark = pool.run(measure_links, effort, args.name, timeout=_SECONDS)[0]
            progress(1, 1)
    finally:
        pool.close()
    return found


def _measure_launched(
    effort: "Effort", name: str, *, quiet: bool, on_gpus: bool
) -> "LinksBenchmark":
    import torch
    import torch.distributed as dist

    from megatron_splitkv.bench.links import measure_links

    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=_SECONDS))
    try:
        with stage_bars(quiet=quiet) as stages, stages.stage("links") as progress:
            return measure_links(effort, name, progress)
    finally:
        dist.destroy_process_group()
