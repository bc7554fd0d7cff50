"""From blocks to a plan: cut the context, price the chunks, hand them out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import BLOCK_ORDERS, PLAN_STRATEGIES, ConfigError, require_choice
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.balanced import EVEN, assign_balanced
from megatron_splitkv.plan.block_order import mirrored_order
from megatron_splitkv.plan.checks import check_int, check_layout, check_windows
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.cost import PlanCost, choose_plan
from megatron_splitkv.plan.hypergraph import assign_hypergraph
from megatron_splitkv.plan.local import local_chunks
from megatron_splitkv.plan.locality import match_ranks
from megatron_splitkv.plan.pricing import (
    FULL_ATTENTION,
    price_chunks,
    price_chunks_in_tiles,
    price_own_blocks,
    price_own_blocks_in_tiles,
)
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.strategies import (
    assign_contiguous,
    assign_lpt,
    equal_chunks,
    recut,
    zigzag_chunks,
)
from megatron_splitkv.plan.tiles import KERNEL_TILE

_MAX_CHUNKS_PER_RANK = 32
# One or two chunks a rank leave 10 to 60 % imbalance, four about 1 %; where chunks are shorter than
# a kernel tile, more of them fill more tiles.
_MIN_CHUNKS_PER_RANK = 4
_FINER_THAN_ZIGZAG = 8  # `balanced` looks at `zigzag` too from so many chunks a rank on


def build_plan(
    layout: BlockLayout,
    context_length: int,
    cp_size: int,
    *,
    strategy: str = "balanced",
    chunks_per_rank: int | None = None,
    windows: Sequence[int | None] = FULL_ATTENTION,
    tiles: bool = False,
    source: RowSource | None = None,
    cost: PlanCost | None = None,
    block_order: str = "contiguous",
) -> ContextPlan:
    """Assign context rows and draft blocks to the ranks of a context-parallel group.

    How many chunks a rank: on the paper's workload with 64 ranks the imbalance is 1.1, 0.06, 0.009,
    0.001 and 0.0002 % with J = 4, 8, 16, 32 and 64, and planning with 32 takes 1.3 times as long as
    with 16, with 64 twice as long again. So the default is 32, or as many as leave every chunk the
    128 rows of a kernel tile, of which shorter ones would waste a part.

    `balanced` is never less even than `lpt` or `none` with the same J, in what is priced. From
    J = 8 on it is not behind `zigzag` either (but for 0.01 %), if the pack has at most J / 2
    documents, every rank J rows or more, and pairs are priced, not tiles. Otherwise `zigzag`, which
    has as many chunks as it likes, may be ahead: regular anchors, windows, or documents without
    anchors can make mirrored chunks even where J equal ones are not.

    A context with fewer rows than ranks is planned: some ranks then hold none.

    Args:
        layout: the blocks of the micro-batch, as `select_anchors` draws them.
        context_length: S, rows of the packed context, tail padding included.
        cp_size: P.
        strategy: `none` (contiguous rows), `zigzag` (2P chunks a document, mirrored), `lpt` (the
            paper's), `balanced` (the default: differencing and swaps, own blocks counted too),
            `balanced-local` (balanced, each document within as few ranks as balance allows),
            `hypergraph` (a general partitioner, to compare with; an optional package) or `auto`
            (of `balanced` and `balanced-local` the one that is cheaper by `cost`).
        chunks_per_rank: J, chunks a rank; by default as many as leave every chunk one kernel tile
            long, at most 32 and, where rows allow, at least 4. `zigzag` has its own cut and ignores
            it.
        windows: attention windows of the layers whose work is balanced, one entry each; None is
            full attention.
        tiles: count kernel tiles of 128 x 128 instead of pairs: cut the context at multiples of
            128, where chunks are that long, and price chunks by the tiles that they fill. Ranks
            then differ by up to a tile a chunk in rows, and a little in pairs. The busiest rank
            computes fewer tiles: as measured 4 to 5 % on 64 ranks and 1 % on 8 where S / (P J) is
            no multiple of 128, 0.3 % at most where it is, and nothing where all layers have short
            windows. `zigzag` and `balanced-local` cut and price as without it.
        source: where the rows already are. Bundles are then given to the ranks that hold most of
            their rows; loads stay as they are. `balanced-local` keeps every bundle in its group.
        cost: of a layer, for `auto`; the same on every rank.
        block_order: who owns which draft blocks. `contiguous`: in the order of the layout, so that
            a document's are on few ranks. `mirrored`: dealt out to and fro by what they see, for
            attention that works where queries are (`all_gather`, `p2p` and their like). The plan's
            layout then has them in that order; nothing else changes for who reads it.

    Returns:
        The plan, with the layout padded to a multiple of `cp_size` and in the order of the blocks'
        owners; the same on every rank.

    Raises:
        ConfigError: unknown strategy, impossible sizes, more chunks than rows, blocks outside the
            context, `auto` without a cost, or a package is missing.
    """
    require_choice("plan strategy", strategy, (*PLAN_STRATEGIES, "auto"))
    require_choice("block order", block_order, BLOCK_ORDERS)
    if strategy == "auto":
        if cost is None:
            raise ConfigError(
                "plan strategy 'auto' weighs even work against queries that travel; give "
                "build_plan a cost, or name a strategy"
            )
        plans = [
            build_plan(
                layout,
                context_length,
                cp_size,
                strategy=name,
                chunks_per_rank=chunks_per_rank,
                windows=windows,
                tiles=tiles,
                source=source,
                block_order=block_order,
            )
            for name in ("balanced", "balanced-local")
        ]
        return choose_plan(plans, cost)
    context_length = check_int("context_length", context_length, 0)
    cp_size = check_int("cp_size", cp_size, 1)
    if source is not None and not isinstance(source, RowSource):
        raise ConfigError(
            f"source {source!r} must be a RowSource, such as RowSource.zigzag(length, cp_size)"
        )
    chunks_per_rank = _chunks_per_rank(chunks_per_rank, context_length, cp_size)
    if strategy == "balanced-local":
        balanced = build_plan(
            layout,
            context_length,
            cp_size,
            chunks_per_rank=chunks_per_rank,
            windows=windows,
            block_order=block_order,
        )
        bounds, owner = local_chunks(balanced, chunks_per_rank, source)
        return replace(balanced, chunk_bounds=bounds, chunk_owner=owner, strategy=strategy)
    windows = check_windows(windows)
    check_layout(layout, context_length)
    padded = _pad_blocks(layout, cp_size)
    if block_order == "mirrored":
        padded = _reordered(padded, mirrored_order(padded, cp_size))
    num_chunks = cp_size * chunks_per_rank
    bounds = equal_chunks(context_length, num_chunks, KERNEL_TILE if tiles else 1)
    price_own = price_own_blocks_in_tiles if tiles else price_own_blocks
    own_work = price_own(padded, cp_size, windows)
    chunk_work = None

    if strategy == "none":
        owner = assign_contiguous(num_chunks, cp_size)
    elif strategy == "zigzag":
        bounds, owner = zigzag_chunks(_document_bounds(layout, context_length), cp_size)
    else:
        price = price_chunks_in_tiles if tiles else price_chunks
        chunk_work = price(layout, bounds, windows)
        if strategy == "lpt":
            owner = assign_lpt(chunk_work, cp_size, chunks_per_rank)
        elif strategy == "hypergraph":
            owner = assign_hypergraph(padded, bounds, chunk_work, own_work)
        else:
            owner = assign_balanced(chunk_work, own_work, chunks_per_rank)
    prices = None if tiles else chunk_work
    plan = ContextPlan(padded, bounds, owner, cp_size, strategy, windows, block_order, prices)
    if strategy == "balanced" and not tiles:
        plan = _or_zigzag(plan, chunks_per_rank)
    if source is not None:
        owner = match_ranks(plan.chunk_bounds, plan.chunk_owner, own_work, source)
        plan = replace(plan, chunk_owner=owner)
    return plan


def _or_zigzag(plan: ContextPlan, chunks_per_rank: int) -> ContextPlan:
    """The plan, or the one of `zigzag` cut to as many chunks a rank where that is more even.

    It may be where anchors lie at even distances, and where short documents have all the work.
    With more than J documents rank 0 would get more than J ranges (unless they are single rows),
    so nothing is tried: 2 P chunks for each of many documents would cost more than all the rest.
    """
    if chunks_per_rank < _FINER_THAN_ZIGZAG or plan.imbalance <= EVEN:
        return plan
    documents = _document_bounds(plan.layout, plan.context_length)
    if documents.size - 1 > chunks_per_rank:
        return plan
    bounds, owner = zigzag_chunks(documents, plan.cp_size)
    work = plan.work - plan.context_work
    np.add.at(work, owner, price_chunks(plan.layout, bounds, plan.windows))
    if work.max() >= plan.work.max():
        return plan
    chunks = recut(bounds, owner, plan.cp_size, chunks_per_rank)
    return plan if chunks is None else replace(plan, chunk_bounds=chunks[0], chunk_owner=chunks[1])


def _document_bounds(layout: BlockLayout, context_length: int) -> NDArray[np.int64]:
    """Where documents with blocks begin, and both ends of the context."""
    ends = np.array([0, context_length], dtype=np.int64)
    return np.union1d(layout.document_starts, ends)


def fitting_chunks(wanted: int | None, context_length: int, cp_size: int) -> int | None:
    """`wanted` chunks a rank, or the most that a shorter context allows; None stays None.

    For packs of any length under one wish: `build_plan` itself refuses empty chunks.
    """
    return None if wanted is None else min(wanted, _most_chunks(context_length, cp_size))


def _most_chunks(context_length: int, cp_size: int) -> int:
    return max(1, context_length // cp_size)


def _chunks_per_rank(wanted: int | None, context_length: int, cp_size: int) -> int:
    """J: what the user wants, or as many chunks as leave each one kernel tile long."""
    if wanted is None:
        fitting = context_length // (cp_size * KERNEL_TILE)
        least = min(_MIN_CHUNKS_PER_RANK, _most_chunks(context_length, cp_size))
        return max(least, min(_MAX_CHUNKS_PER_RANK, fitting))
    wanted = check_int("chunks_per_rank", wanted, 1)
    most = _most_chunks(context_length, cp_size)
    if wanted > most:
        raise ConfigError(
            f"chunks_per_rank {wanted} would leave chunks empty: {context_length} rows on "
            f"{cp_size} ranks allow at most {most}; leave it out to have it chosen"
        )
    return wanted


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


def _reordered(layout: BlockLayout, order: NDArray[np.int64]) -> BlockLayout:
    return BlockLayout(
        layout.anchor_positions[order],
        layout.document_starts[order],
        layout.block_keep_mask[order],
        layout.block_size,
    )
