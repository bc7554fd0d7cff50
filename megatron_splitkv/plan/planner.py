"""From blocks to a plan: cut the context, price the chunks, hand them out."""

import numpy as np

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError, require_choice
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.balanced import assign_balanced
from megatron_splitkv.plan.context_plan import ContextPlan, check_layout
from megatron_splitkv.plan.local import local_chunks
from megatron_splitkv.plan.pricing import price_chunks, price_own_blocks
from megatron_splitkv.plan.strategies import (
    assign_contiguous,
    assign_lpt,
    equal_chunks,
    zigzag_chunks,
)

_KERNEL_TILE = 128  # a chunk shorter than this wastes the kernel's key tiles
_MAX_CHUNKS_PER_RANK = 32


def build_plan(
    layout: BlockLayout,
    context_length: int,
    cp_size: int,
    *,
    strategy: str = "balanced",
    chunks_per_rank: int | None = None,
) -> ContextPlan:
    """Assign context rows and draft blocks to the ranks of a context-parallel group.

    Args:
        layout: the blocks of the micro-batch, as `select_anchors` draws them.
        context_length: S, rows of the packed context, tail padding included.
        cp_size: P.
        strategy: `none` (contiguous rows), `zigzag` (2P chunks a document, mirrored), `lpt` (the
            paper's), `balanced` (the default: differencing and swaps, own blocks counted too), or
            `balanced-local` (balanced, each document within as few ranks as balance allows).
        chunks_per_rank: J, chunks a rank; by default as many as leave every chunk one kernel tile
            long, at most 32. `zigzag` has its own cut and ignores it.

    Returns:
        The plan, with the layout padded to a multiple of `cp_size`; the same on every rank.

    Raises:
        ConfigError: unknown strategy, impossible sizes, or blocks outside the context.
    """
    require_choice("plan strategy", strategy, PLAN_STRATEGIES)
    if context_length < 0:
        raise ConfigError(f"context_length {context_length} must not be negative")
    if cp_size < 1:
        raise ConfigError(f"cp_size {cp_size} must be at least 1")
    if chunks_per_rank is None:
        tiles = context_length // (cp_size * _KERNEL_TILE)
        chunks_per_rank = max(1, min(_MAX_CHUNKS_PER_RANK, tiles))
    if chunks_per_rank < 1:
        raise ConfigError(f"chunks_per_rank {chunks_per_rank} must be at least 1")
    check_layout(layout, context_length)
    padded = _pad_blocks(layout, cp_size)

    if strategy == "zigzag":
        ends = np.array([0, context_length], dtype=np.int64)
        documents = np.union1d(layout.document_starts, ends)
        bounds, owner = zigzag_chunks(documents, cp_size)
    elif strategy == "balanced-local":
        bounds, owner = local_chunks(padded, context_length, cp_size, chunks_per_rank)
    else:
        num_chunks = cp_size * chunks_per_rank
        bounds = equal_chunks(context_length, num_chunks)
        if strategy == "none":
            owner = assign_contiguous(num_chunks, cp_size)
        elif strategy == "lpt":
            owner = assign_lpt(price_chunks(layout, bounds), cp_size, chunks_per_rank)
        else:
            chunk_work, own_work = price_chunks(layout, bounds), price_own_blocks(padded, cp_size)
            owner = assign_balanced(chunk_work, own_work, chunks_per_rank)
    return ContextPlan(padded, bounds, owner, cp_size, strategy)


def _pad_blocks(layout: BlockLayout, multiple: int) -> BlockLayout:
    """Append padding blocks at the start of the last document until the count divides."""
    missing = -layout.num_blocks % multiple
    if not missing:
        return layout
    padding = np.repeat(layout.document_starts[-1:], missing)
    return BlockLayout(
        np.concatenate([layout.anchor_positions, padding]),
        np.concatenate([layout.document_starts, padding]),
        np.concatenate([layout.block_keep_mask, np.zeros(missing, dtype=np.bool_)]),
        layout.block_size,
    )
