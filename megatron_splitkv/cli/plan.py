"""`splitkv plan`: how evenly each strategy spreads a workload over context-parallel ranks."""

import argparse
import json
import re
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any

from megatron_splitkv.cli.plan_workload import add_workload, find_workload, shown
from megatron_splitkv.cli.progress import progress_bar
from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError, require_choice

if TYPE_CHECKING:
    from megatron_splitkv.plan.comparison import Windows

MAX_WINDOW = 1 << 31
MAX_LAYERS = 1024
_SOURCES = ("zigzag", "contiguous", "none")
_NO_KAHYPAR = "hypergraph is left out: it needs KaHyPar, pip install 'megatron-splitkv[hypergraph]'"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="compare planning strategies on a workload, described or of a feature store",
        description="Plans packed micro-batches under every strategy and prints, and on request "
        "draws, how even the ranks' attention work is and what that costs. The workload is "
        "described by --documents, or is what training reads from a --feature-store.",
    )
    add_workload(parser)
    for option, default, text in (
        ("--step", 0, "the first pack, or draw of anchors, counted from 0"),
        ("--steps", 1, "how many packs or draws; the table then has means and worst cases"),
        ("--num-anchors", 512, "anchors a document"),
        ("--block-size", 16, "slots a draft block"),
        ("--cp-size", 8, "context-parallel ranks"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--chunks-per-rank",
        type=int,
        metavar="J",
        help="default: as many as leave a chunk 128 rows long, at least 4 and at most 32",
    )
    parser.add_argument(
        "--windows",
        default="none",
        metavar="LIST",
        help="attention windows of the layers, e.g. 'none,512,512' (default: one full layer)",
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="cut and price chunks by kernel tiles of 128 x 128 instead of pairs, as "
        "build_plan(tiles=True) does; zigzag and balanced-local stay as they are",
    )
    parser.add_argument(
        "--source",
        default="zigzag",
        choices=_SOURCES,
        help="where the rows are before the plan moves them; none: every rank reads its own "
        "(default: %(default)s, Megatron's)",
    )
    parser.add_argument(
        "--strategies",
        metavar="LIST",
        help=f"which to compare, of {','.join(PLAN_STRATEGIES)} (default: all that can run)",
    )
    parser.add_argument("--draw", metavar="FILE", help="draw the plans, as .png or .svg")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Plan under every strategy, print the comparison, draw it if asked."""
    from megatron_splitkv.cli.plan_report import comparison_json, print_comparison
    from megatron_splitkv.plan.comparison import compare_strategies

    windows = parse_windows(args.windows)
    strategies, left_out = _strategies(args.strategies, args.cp_size)
    if args.draw is not None:
        from megatron_splitkv.plan.draw import check_picture, draw_plans

        check_picture(args.draw)
    batches = find_workload(args)
    total, done = 2 * args.steps * len(strategies), count(1)
    with progress_bar("plans", quiet=args.json) as progress:
        progress(0, total)
        comparison = compare_strategies(
            batches,
            args.cp_size,
            strategies,
            chunks_per_rank=args.chunks_per_rank,
            windows=windows,
            tiles=args.tiles,
            source=args.source,
            one_more=lambda: progress(next(done), total),
        )
    if args.json:
        print(json.dumps(comparison_json(comparison)))
    else:
        print_comparison(comparison)
        if left_out:
            print(left_out)
    if args.draw is not None:
        draw_plans(list(comparison.plans.values()), args.draw)
        if not args.json:
            print(f"drawn: {args.draw}")
    return 0


def parse_windows(text: str) -> "Windows":
    """Windows of the layers from 'none,512,512'.

    Raises:
        ConfigError: not a list of positive numbers and 'none'.
    """
    windows: list[int | None] = []
    for part in text.lower().split(","):
        word = part.strip()
        number = int(word) if re.fullmatch("[0-9]{1,18}", word) else 0
        if word != "none" and not 1 <= number <= MAX_WINDOW:
            raise ConfigError(
                f"--windows {shown(text)}: {shown(word)} is no window; write 'none' for a layer "
                f"with full attention or the number of positions that it sees, at most "
                f"{MAX_WINDOW:,}, e.g. 'none,512,512'"
            )
        windows.append(None if word == "none" else number)
    if len(windows) > MAX_LAYERS:
        raise ConfigError(f"--windows names {len(windows):,} layers; at most {MAX_LAYERS:,}")
    return tuple(windows)


def _strategies(text: str | None, cp_size: int) -> tuple[list[str], str | None]:
    """What to compare, and what to say about that which cannot run, or not in time."""
    if text is None:
        from megatron_splitkv.plan.comparison import HYPERGRAPH_RANKS

        left_out = None
        if find_spec("kahypar") is None:
            left_out = _NO_KAHYPAR
        elif cp_size > HYPERGRAPH_RANKS:
            left_out = (
                f"hypergraph is left out: for more than {HYPERGRAPH_RANKS} ranks it needs minutes; "
                "--strategies hypergraph plans with it all the same"
            )
        return [n for n in PLAN_STRATEGIES if not left_out or n != "hypergraph"], left_out
    names = [
        require_choice("--strategies", name.strip(), PLAN_STRATEGIES) for name in text.split(",")
    ]
    return list(dict.fromkeys(names)), None
