"""`splitkv bench quality`: does a drafter need more queries where its context is longer?"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_splitkv.cli.progress import stage_bars

if TYPE_CHECKING:
    from megatron_splitkv.bench.quality_shape import QualityShape

_DEFAULT_OUTPUT = "runs/bench-quality"


def add_quality(
    benchmarks: Any, add_outputs: Callable[[argparse.ArgumentParser, str], None]
) -> None:
    """Add the benchmark's parser.

    Args:
        benchmarks: subparsers of `splitkv bench`.
        add_outputs: adds ``--output`` and ``--json``.
    """
    parser = benchmarks.add_parser(
        "quality",
        help="acceptance length over query budget and context length, as in the paper's Appendix A",
        description="Trains a byte-level target and seven drafters of it, which differ in S, the "
        "length to which samples are cut, or in Q, anchors a sample times block size; each takes "
        "the same steps of the real training entry, and decodes held-out prompts of every length. "
        f"Everything lies in the output folder (default: {_DEFAULT_OUTPUT}); what is finished "
        "there is not done again.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="length of the study on two idle cores (default: %(default)s)",
    )
    for option, text in (
        ("--steps", "training steps of each drafter, instead of those of the minutes"),
        ("--target-steps", "training steps of the target, likewise"),
        ("--documents", "training samples, a multiple of 8 (default: six epochs of them)"),
    ):
        parser.add_argument(option, type=int, metavar="N", help=text)
    for option, default, text in (
        ("--contexts", "128,256,512,1024", "S of Fix Q, multiples of 64"),
        ("--anchors", "8,16,32,64", "anchors a sample of Fix S; the third one is Fix Q's"),
    ):
        parser.add_argument(
            option, default=default, metavar="LIST", help=f"{text} (default: %(default)s)"
        )
    for option, number, text in (
        ("--prompts", 48, "held-out samples, each a prompt of every length"),
        ("--ranks", 1, "processes that train a drafter, context-parallel"),
        ("--seed", 0, "of target, text, anchors and weights"),
    ):
        parser.add_argument(
            option, type=int, default=number, metavar="N", help=f"{text} (default: %(default)s)"
        )
    add_outputs(parser, "quality")
    parser.set_defaults(run_benchmark=run_quality, output=_DEFAULT_OUTPUT)


def run_quality(args: argparse.Namespace) -> Any:
    """Run what is left of the study; see `bench.Outcome`.

    Raises:
        ConfigError: sizes that do not fit, or a training that failed.
    """
    shape = _shape(args)
    # Read when tqdm and torch are imported: no bars through ours, no threads that spin.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_splitkv.bench.quality import bench_quality
    from megatron_splitkv.bench.quality_report import draw_quality, print_quality
    from megatron_splitkv.bench.quality_training import train_drafter
    from megatron_splitkv.bench.report import reported
    from megatron_splitkv.cli.bench_quality_decoding import HeldOutDecoding
    from megatron_splitkv.data.text import standard_library_text

    with stage_bars(quiet=args.json) as stages:
        result = bench_quality(
            shape,
            Path(args.output),
            standard_library_text,
            train=train_drafter,
            measure=HeldOutDecoding(),
            stages=stages,
        )
    return reported("quality", result, print_quality, draw_quality)


def _shape(args: argparse.Namespace) -> "QualityShape":
    from megatron_splitkv.bench.quality_shape import QualityShape
    from megatron_splitkv.cli.bench import parse_numbers

    given = {
        "steps": args.steps,
        "target_steps": args.target_steps,
        "documents": args.documents,
    }
    return QualityShape.for_minutes(
        args.minutes,
        contexts=parse_numbers("--contexts", args.contexts),
        anchors=parse_numbers("--anchors", args.anchors),
        held_out=args.prompts,
        ranks=args.ranks,
        seed=args.seed,
        **{name: value for name, value in given.items() if value is not None},
    )
