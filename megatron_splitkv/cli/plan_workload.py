"""The micro-batches that `splitkv plan` plans: described by their lengths, or of a feature store.

Made one by one, while they are planned. What no machine could plan is refused before the work.
"""

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError

if TYPE_CHECKING:
    from megatron_splitkv.plan.comparison import MicroBatch

# Each of these is planned within a minute or two and in a few gigabytes.
MAX_TOKENS = 1 << 26
MAX_DOCUMENTS = 1 << 16
MAX_RANKS = 4096
_MAX_DRAFT_ROWS = 1 << 24
_MAX_CHUNKS = 1 << 20
_MAX_EPOCHS = 1000  # of a store, packed one after the other to find a step
_DOCUMENTS = "4x262144"
_TRAINING_SEED = 1234  # Megatron's default, and so that of a run which names none


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is planned."""
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
        "--feature-store",
        metavar="DIR",
        help="pack its documents as training does, which takes the same packs on any number of "
        "ranks (data-parallel replicas share out those of a step)",
    )
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens a pack, with a store")
    parser.add_argument(
        "--max-anchors-per-pack",
        type=int,
        metavar="N",
        help="draft blocks a pack at most, with a store (default: as many as its tokens hold)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help=f"of packs and anchors (default: 0; with a store {_TRAINING_SEED}, as in training)",
    )


def find_workload(args: argparse.Namespace) -> "Iterator[MicroBatch]":
    """The micro-batches that the options name, made when they are asked for.

    Raises:
        ConfigError: options that do not go together, or more than can be planned; of a store's
            packs when their turn comes.
    """
    if args.seed is None:
        args.seed = 0 if args.feature_store is None else _TRAINING_SEED
    for option, least in (("step", 0), ("seed", 0), ("steps", 1), ("cp_size", 1)):
        value = getattr(args, option)
        if value < least:
            must = f"be at least {least}" if least else "not be negative"
            raise ConfigError(f"{_flag(option)} {value} must {must}")
    if args.cp_size > MAX_RANKS:
        raise ConfigError(f"--cp-size {args.cp_size} must be at most {MAX_RANKS}")
    return _stored(args) if args.feature_store is not None else _described(args)


def parse_lengths(text: str) -> NDArray[np.int64]:
    """Document lengths from '4x262144' or '3072,256,256' (parts of both kinds may be mixed).

    Raises:
        ConfigError: not a list of positive lengths, or too many.
    """
    found = [re.fullmatch("(?:([0-9]{1,18})x)?([0-9]{1,18})", p.strip()) for p in text.split(",")]
    parts = [(int(part[1] or 1), int(part[2])) for part in found if part]
    tokens = sum(count * length for count, length in parts)
    if (
        len(parts) < len(found)
        or min(min(part) for part in parts) < 1
        or sum(count for count, _ in parts) > MAX_DOCUMENTS
        or tokens > MAX_TOKENS
    ):
        raise ConfigError(
            f"--documents {shown(text)} is not a list of at most {MAX_DOCUMENTS:,} lengths of up "
            f"to {MAX_TOKENS:,} tokens together; write '4x262144' or '3072,256'"
        )
    counts, lengths = np.array(parts, dtype=np.int64).T
    return np.repeat(lengths, counts)


def shown(text: str) -> str:
    """What a user typed, in quotes; of a long text the beginning."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _described(args: argparse.Namespace) -> "Iterator[MicroBatch]":
    for option in ("seq_length", "max_anchors_per_pack"):
        if getattr(args, option) is not None:
            raise ConfigError(f"{_flag(option)} packs a feature store: give --feature-store too")
    fraction = 0.25 if args.prompt_fraction is None else args.prompt_fraction
    if not 0 <= fraction < 1:
        raise ConfigError(f"--prompt-fraction {fraction} must be in [0, 1)")
    lengths = parse_lengths(_DOCUMENTS if args.documents is None else args.documents)
    tokens = int(lengths.sum())
    if args.cp_size > tokens:
        raise ConfigError(
            f"--cp-size {args.cp_size} is more ranks than the {tokens:,} context rows of "
            "--documents; take fewer ranks or longer documents"
        )
    _check_size(args, lengths, args.chunks_per_rank)
    most = tokens // args.cp_size
    if args.chunks_per_rank is not None and not 1 <= args.chunks_per_rank <= most:
        raise ConfigError(
            f"--chunks-per-rank {args.chunks_per_rank} must be from 1 to {most:,}, the context "
            "rows of a rank; leave it out to have it chosen"
        )
    return _draw(args, lengths, fraction)


def _draw(
    args: argparse.Namespace, lengths: NDArray[np.int64], fraction: float
) -> "Iterator[MicroBatch]":
    from megatron_splitkv.data.anchors import select_anchors
    from megatron_splitkv.plan.comparison import MicroBatch

    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    loss_mask = np.ones(cu_seqlens[-1], dtype=np.bool_)
    for start, length in zip(cu_seqlens, lengths, strict=False):
        loss_mask[start : start + int(length * fraction)] = False
    for step in range(args.step, args.step + args.steps):
        layout = select_anchors(
            loss_mask,
            cu_seqlens,
            num_anchors=min(args.num_anchors, int(lengths.max())),  # as `draw_blocks` does
            block_size=args.block_size,
            seed=args.seed,
            step=step,
            sample_ids=np.arange(lengths.size),
        )
        yield MicroBatch(layout.without_padding(), cu_seqlens)


def _stored(args: argparse.Namespace) -> "Iterator[MicroBatch]":
    from megatron_splitkv.data.store import FeatureStore
    from megatron_splitkv.train.packing_arguments import check_packing, packed_epochs

    for option in ("documents", "prompt_fraction"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"{_flag(option)} describes a workload; leave it out, or leave out --feature-store"
            )
    if args.seq_length is None:
        raise ConfigError("--feature-store needs --seq-length, the tokens of a pack in training")
    if not args.cp_size <= args.seq_length <= MAX_TOKENS:
        raise ConfigError(
            f"--seq-length {args.seq_length} must be at least --cp-size {args.cp_size} and at most "
            f"{MAX_TOKENS:,}"
        )
    check_packing(args)
    store = FeatureStore(args.feature_store)
    packing = packed_epochs(args, store.lengths)
    last, packs = args.step + args.steps - 1, packing.num_packs(0)
    if last >= packs * _MAX_EPOCHS:
        raise ConfigError(
            f"--step {args.step} with --steps {args.steps} is beyond {_MAX_EPOCHS} epochs: one has "
            f"about {packs:,} packs; name steps before {packs * _MAX_EPOCHS:,}"
        )
    return _pack(args, store, packing)


def _pack(args: argparse.Namespace, store: Any, packing: Any) -> "Iterator[MicroBatch]":
    from megatron_splitkv.data.packing import draw_blocks, read_pack
    from megatron_splitkv.plan import fitting_chunks
    from megatron_splitkv.plan.comparison import MicroBatch

    for item in range(args.step, args.step + args.steps):
        documents = packing.pack_documents(item)
        lengths = store.lengths[documents]
        chunks = fitting_chunks(args.chunks_per_rank, int(lengths.sum()), args.cp_size)
        _check_size(args, lengths, chunks)
        pack = read_pack(store, documents)
        layout = draw_blocks(
            pack,
            num_anchors=args.num_anchors,
            block_size=args.block_size,
            seed=args.seed,
            item_index=item,
        )
        yield MicroBatch(layout, pack.cu_seqlens)


def _check_size(
    args: argparse.Namespace, lengths: NDArray[np.int64], chunks_per_rank: int | None
) -> None:
    """Refuse a micro-batch of too many blocks or chunks."""
    documents = lengths.size
    anchors = min(args.num_anchors, int(lengths.max()))
    if documents * anchors * args.block_size > _MAX_DRAFT_ROWS:
        raise ConfigError(
            f"{documents:,} documents with {anchors:,} anchors of --block-size {args.block_size} "
            f"have more than {_MAX_DRAFT_ROWS:,} draft rows; take fewer documents, --num-anchors, "
            "or smaller blocks"
        )
    for what, chunks in (
        (f"2 a rank of {documents:,} documents", 2 * documents),  # zigzag's
        (f"--chunks-per-rank {chunks_per_rank}", chunks_per_rank or 1),
    ):
        if chunks * args.cp_size > _MAX_CHUNKS:
            raise ConfigError(
                f"{what} on {args.cp_size} ranks are more than {_MAX_CHUNKS:,} chunks; take fewer"
            )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
