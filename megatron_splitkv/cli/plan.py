"""`splitkv plan`: how evenly each strategy spreads a workload over context-parallel ranks."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError, require_choice

if TYPE_CHECKING:
    from megatron_splitkv.data.target import Progress
    from megatron_splitkv.plan.comparison import MicroBatch, Windows

MAX_TOKENS = 1 << 28  # the described workload's loss mask lies in memory
_DOCUMENTS = "4x262144"
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
    parser.add_argument(
        "--documents",
        metavar="LENGTHS",
        help=f"packed documents in tokens: '4x262144' or '3072,256,256' (default: {_DOCUMENTS})",
    )
    parser.add_argument(
        "--prompt-fraction",
        type=float,
        metavar="SHARE",
        help="share of each described document without supervision (default: 0.25, the paper's)",
    )
    parser.add_argument(
        "--feature-store", metavar="DIR", help="pack its documents as training does"
    )
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens a pack, with a store")
    for option, default, text in (
        ("--step", 0, "the first pack, or draw of anchors, counted from 0"),
        ("--steps", 1, "how many packs or draws; the table then has means and worst cases"),
        ("--num-anchors", 512, "anchors a document"),
        ("--block-size", 16, "slots a draft block"),
        ("--cp-size", 8, "context-parallel ranks"),
        ("--seed", 0, "of packs and anchors"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(option, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--chunks-per-rank",
        type=int,
        metavar="J",
        help="default: as many as leave a chunk 128 rows long, at most 32",
    )
    parser.add_argument(
        "--windows",
        default="none",
        metavar="LIST",
        help="attention windows of the layers, e.g. 'none,512,512' (default: one full layer)",
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
    strategies, left_out = _strategies(args.strategies)
    if args.draw:
        from megatron_splitkv.plan.draw import draw_plans, picture_format

        picture_format(args.draw)
        if not Path(args.draw).absolute().parent.is_dir():
            raise ConfigError(f"--draw {args.draw}: its folder does not exist")
    for option in ("step", "seed"):
        if getattr(args, option) < 0:
            raise ConfigError(f"--{option} {getattr(args, option)} must not be negative")
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    batches = _stored(args) if args.feature_store else _described(args)
    with _progress(quiet=args.json or args.steps == 1) as progress:
        comparison = compare_strategies(
            batches,
            args.cp_size,
            strategies,
            chunks_per_rank=args.chunks_per_rank,
            windows=windows,
            source=args.source,
            progress=progress,
        )
    if args.json:
        print(json.dumps(comparison_json(comparison)))
    else:
        print_comparison(comparison)
        if left_out:
            print(left_out)
    if args.draw:
        draw_plans(list(comparison.plans.values()), args.draw)
        if not args.json:
            print(f"drawn: {args.draw}")
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


def parse_windows(text: str) -> "Windows":
    """Windows of the layers from 'none,512,512'.

    Raises:
        ConfigError: not a list of positive numbers and 'none'.
    """
    windows: list[int | None] = []
    for part in text.lower().split(","):
        word = part.strip()
        if word != "none" and not (word.isdecimal() and int(word) > 0):
            raise ConfigError(
                f"--windows {text!r}: {word!r} is no window; write 'none' for a layer with full "
                "attention or the number of positions that it sees, e.g. 'none,512,512'"
            )
        windows.append(None if word == "none" else int(word))
    return tuple(windows)


def _strategies(text: str | None) -> tuple[list[str], str | None]:
    """What to compare, and what to say about that which cannot run."""
    has_kahypar = find_spec("kahypar") is not None
    if text is None:
        names = [name for name in PLAN_STRATEGIES if has_kahypar or name != "hypergraph"]
        return names, None if has_kahypar else _NO_KAHYPAR
    names = [
        require_choice("--strategies", name.strip(), PLAN_STRATEGIES) for name in text.split(",")
    ]
    return list(dict.fromkeys(names)), None


def _described(args: argparse.Namespace) -> "list[MicroBatch]":
    from megatron_splitkv.data.anchors import select_anchors
    from megatron_splitkv.plan.comparison import MicroBatch

    if args.seq_length is not None:
        raise ConfigError("--seq-length packs a feature store: give --feature-store too")
    fraction = 0.25 if args.prompt_fraction is None else args.prompt_fraction
    if not 0 <= fraction < 1:
        raise ConfigError(f"--prompt-fraction {fraction} must be in [0, 1)")
    lengths = parse_lengths(_DOCUMENTS if args.documents is None else args.documents)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    loss_mask = np.ones(cu_seqlens[-1], dtype=np.bool_)
    for start, length in zip(cu_seqlens, lengths, strict=False):
        loss_mask[start : start + int(length * fraction)] = False
    return [
        MicroBatch(
            select_anchors(
                loss_mask,
                cu_seqlens,
                num_anchors=args.num_anchors,
                block_size=args.block_size,
                seed=args.seed,
                step=step,
                sample_ids=np.arange(lengths.size),
            ).without_padding(),
            cu_seqlens,
        )
        for step in range(args.step, args.step + args.steps)
    ]


def _stored(args: argparse.Namespace) -> "list[MicroBatch]":
    from megatron_splitkv.data.packing import PackedEpochs, draw_blocks, read_pack
    from megatron_splitkv.data.store import FeatureStore
    from megatron_splitkv.plan.comparison import MicroBatch

    for option in ("documents", "prompt_fraction"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} describes a workload; leave it out, or leave out "
                "--feature-store"
            )
    if args.seq_length is None:
        raise ConfigError("--feature-store needs --seq-length, the tokens of a pack in training")
    store = FeatureStore(args.feature_store)
    packing = PackedEpochs(store.lengths, args.seq_length, args.seed)
    batches = []
    for item in range(args.step, args.step + args.steps):
        pack = read_pack(store, packing.pack_documents(item))
        layout = draw_blocks(
            pack,
            num_anchors=args.num_anchors,
            block_size=args.block_size,
            seed=args.seed,
            item_index=item,
        )
        batches.append(MicroBatch(layout, pack.cu_seqlens))
    return batches


@contextmanager
def _progress(*, quiet: bool) -> "Iterator[Progress]":
    if quiet:
        yield lambda done, total: None
        return
    from megatron_splitkv.cli.progress import stage_bars  # imports torch

    with stage_bars() as stages, stages.stage("micro-batches") as progress:
        yield progress
