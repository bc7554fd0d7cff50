"""`splitkv plan`: how evenly each strategy spreads a workload over context-parallel ranks."""

import argparse
import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError

MAX_TOKENS = 1 << 28  # the described workload's loss mask lies in memory


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="compare planning strategies on a described workload",
        description="Plans one packed micro-batch under every strategy and prints, and on request "
        "draws, how even the ranks' attention work is.",
    )
    parser.add_argument(
        "--documents",
        default="4x262144",
        metavar="LENGTHS",
        help="packed documents in tokens: '4x262144' or '3072,256,256' (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-fraction",
        type=float,
        default=0.25,
        help="share of each document without supervision (default: %(default)s, the paper's 1:3)",
    )
    parser.add_argument("--num-anchors", type=int, default=512, help="anchors a document")
    parser.add_argument("--block-size", type=int, default=16, help="slots a draft block")
    parser.add_argument("--cp-size", type=int, default=8, help="context-parallel ranks")
    parser.add_argument("--chunks-per-rank", type=int, default=None, help="J (default: by rule)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the anchors")
    parser.add_argument(
        "--draw", metavar="PNG", default=None, help="draw the plan of --strategy into this file"
    )
    parser.add_argument(
        "--strategy", default="balanced", choices=PLAN_STRATEGIES, help="what --draw shows"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Plan under every strategy, print the comparison, draw one plan if asked."""
    from megatron_splitkv.data.anchors import select_anchors
    from megatron_splitkv.plan import build_plan

    lengths = parse_lengths(args.documents)
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must not be negative")
    if not 0 <= args.prompt_fraction < 1:
        raise ConfigError(f"--prompt-fraction {args.prompt_fraction} must be in [0, 1)")
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    loss_mask = np.ones(cu_seqlens[-1], dtype=np.bool_)
    for start, length in zip(cu_seqlens, lengths, strict=False):
        loss_mask[start : start + int(length * args.prompt_fraction)] = False
    layout = select_anchors(
        loss_mask,
        cu_seqlens,
        num_anchors=args.num_anchors,
        block_size=args.block_size,
        seed=args.seed,
        step=0,
        sample_ids=np.arange(lengths.size),
    )
    rows: dict[str, dict[str, float]] = {}
    build_plan(layout, int(cu_seqlens[-1]), args.cp_size)  # untimed: numpy's first calls are slow
    for strategy in PLAN_STRATEGIES:
        begin = time.perf_counter()
        plan = build_plan(
            layout,
            int(cu_seqlens[-1]),
            args.cp_size,
            strategy=strategy,
            chunks_per_rank=args.chunks_per_rank,
        )
        imbalance = plan.imbalance
        rows[strategy] = {
            "imbalance_percent": 100 * imbalance,
            "max_work_pairs": int(plan.work.max()),
            "max_context_rows": max(plan.num_rows(rank) for rank in range(args.cp_size)),
            "planning_ms": 1e3 * (time.perf_counter() - begin),
        }
        if args.draw and strategy == args.strategy:
            from megatron_splitkv.plan.draw import draw_plan

            draw_plan(plan, args.draw)
    if args.json:
        print(json.dumps(rows))
    else:
        print_rows(rows, args)
    return 0


def parse_lengths(text: str) -> NDArray[np.int64]:
    """Document lengths from '4x262144' or '3072,256,256' (parts of both kinds may be mixed).

    Raises:
        ConfigError: not a list of positive lengths.
    """
    lengths: list[int] = []
    try:
        for part in text.split(","):
            count, _, length = part.rpartition("x")
            lengths += [int(length)] * (int(count) if count else 1)
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1 or sum(lengths) > MAX_TOKENS:
        raise ConfigError(
            f"--documents {text!r} is not a list of lengths, up to {MAX_TOKENS:,} tokens together; "
            "write '4x262144' or '3072,256'"
        )
    return np.array(lengths, dtype=np.int64)


def print_rows(rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    """The comparison as a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.documents} tokens on {args.cp_size} context-parallel ranks")
    table.add_column("strategy")
    for name in ("imbalance, max/mean - 1", "most work, pairs", "most rows", "planning, ms"):
        table.add_column(name, justify="right")
    for strategy, row in rows.items():
        table.add_row(
            strategy,
            f"{row['imbalance_percent']:.3f} %",
            f"{row['max_work_pairs']:,}",
            f"{row['max_context_rows']:,}",
            f"{row['planning_ms']:.2f}",
        )
    Console().print(table)
    if args.draw:
        print(f"drawn: {args.draw}")
