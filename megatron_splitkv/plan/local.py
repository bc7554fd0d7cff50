"""Strategy `balanced-local`: the chunks of a document stay within a few consecutive ranks.

Draft blocks then meet their keys on a part of the ranks only, and with query cast `group` they
travel nowhere else. Every document goes to one group of ranks, and within a group the plan is that
of `balanced`. What a group has too much of work it gives to others as the tails of documents: few
blocks have their anchors behind them, so few queries follow.

Blocks are owned in layout order, so groups take documents in that order where they can: the ranks
that hold a document's keys are then those that own its blocks.

Context rows that no block sees cost memory and nothing else. They go wherever rows are fewest.

Shape legend: P ranks, J chunks a rank, G groups, D documents with work, N blocks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.balanced import assign_balanced
from megatron_splitkv.plan.context_plan import ContextPlan
from megatron_splitkv.plan.documents import Documents
from megatron_splitkv.plan.locality import match_ranks
from megatron_splitkv.plan.pricing import price_chunks
from megatron_splitkv.plan.rank_groups import RankGroups, possible_groups
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.tails import Pieces, TakingLimits, even_pieces

# Most work of a rank, in thousandths of an even share (or what `balanced` reaches, if that is
# more): more would cost more attention than the traffic is worth.
_WORK_BOUND = 1015
# Most rows of a rank, in percent of an even share of the context. Keys and values are what a rank's
# memory is spent on, and documents of equal work may differ in length: even rows are not given up
# for more than this.
_ROWS_BOUND = 150
# A rank first takes tails that at most this part of all blocks see, in percent. If work is not even
# then, it takes what it must.
_TAIL_BLOCKS = 5


def local_chunks(
    balanced: ContextPlan,
    chunks_per_rank: int,
    source: RowSource | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut and assign the context such that the busiest rank attends as few blocks as it may.

    Of several ways to group documents and ranks, the one is taken under which the fewest blocks
    see a rank's rows or belong to it, while no rank has more than 1.015 times an even share of the
    work (or what the busiest rank of `balanced` has), nor more than 1.5 times an even share of the
    rows (and J). One group is `balanced` itself, which is kept unless another way needs fewer.
    Deterministic.

    Args:
        balanced: the plan of `balanced`, of pairs.
        chunks_per_rank: J.
        source: where the rows are; bundles then go to the ranks of their group that hold most of
            them. Elsewhere a bundle would part from the blocks that see it.

    Returns:
        (chunk_bounds, chunk_owner). A rank has J chunks of its group's rows, equally long but for
        one row; one that runs over the end of what a group holds in a piece is two or more here.

    Shape:
        -> int64[C + 1], int64[C].
    """
    layout, context_length, cp_size = balanced.layout, balanced.context_length, balanced.cp_size
    bounds, owner, windows = balanced.chunk_bounds, balanced.chunk_owner, balanced.windows
    own_work = balanced.work - balanced.context_work
    even_work = int(balanced.work.sum()) * _WORK_BOUND // (1000 * cp_size)
    most_work = max(int(balanced.work.max()), even_work)
    most_rows = -(-context_length // cp_size) * _ROWS_BOUND // 100

    documents = Documents.of(layout, windows)
    all_ranks = RankGroups(np.zeros_like(documents.work), np.array([cp_size]))
    least, best = most_attended(layout, documents, bounds, owner, cp_size), all_ranks
    for groups in _by_blocks(documents, cp_size):
        if groups.sums(documents.blocks).max() >= least:
            break
        pieces = _even_pieces(documents, groups, own_work, context_length, most_work, most_rows)
        if pieces is None or (attended := _attended(documents, groups, pieces.blocks)) >= least:
            continue
        cuts, chunk_of, work = _cut_groups(
            layout, context_length, groups.size, pieces, chunks_per_rank, windows
        )
        rank, load = _assign(work, own_work, groups.size, chunks_per_rank)
        if load.max() <= most_work:
            least, best, bounds, owner = attended, groups, cuts, rank[chunk_of]
    if source is not None:
        alike = best.of_rank * (int(own_work.max()) + 1) + own_work
        owner = match_ranks(bounds, owner, alike, source)
    return bounds, owner


def _by_blocks(documents: Documents, cp_size: int) -> list[RankGroups]:
    """Possible groups; first those of which no group has many blocks."""
    if not documents.work.any():
        return []
    return sorted(
        possible_groups(documents.work, cp_size),
        key=lambda groups: int(groups.sums(documents.blocks).max()),
    )


def _even_pieces(
    documents: Documents,
    groups: RankGroups,
    own_work: NDArray[np.int64],
    context_length: int,
    most_work: int,
    most_rows: int,
) -> Pieces | None:
    """Pieces that few blocks see beyond their groups, else any, else None: if none are even."""
    num_blocks = documents.of_block.size
    most_blocks = int(groups.sums(documents.blocks).max())
    for tails in (num_blocks * _TAIL_BLOCKS // 100, num_blocks):
        limits = TakingLimits(most_rows, most_blocks + tails)
        pieces = even_pieces(documents, groups, own_work, context_length, limits)
        even = (pieces.work <= most_work * groups.size).all()
        if even and (pieces.rows <= most_rows * groups.size).all():
            return pieces
    return None


def _attended(documents: Documents, groups: RankGroups, seeing: NDArray[np.int64]) -> int:
    """Blocks that a rank attends at most: those `seeing` its group's rows, and its own."""
    home = np.append(groups.group_of, -1)[documents.of_block].reshape(groups.of_rank.size, -1)
    away = (home != groups.of_rank[:, None]).sum(axis=1)
    return int((seeing[groups.of_rank] + away).max())


def most_attended(
    layout: BlockLayout,
    documents: Documents,
    chunk_bounds: NDArray[np.int64],
    chunk_owner: NDArray[np.int64],
    cp_size: int,
) -> int:
    """Blocks that the busiest rank attends: those that see a row of it, and its own.

    What `ContextPlan.needs` says under full attention, without P times as many entries as chunks
    or blocks.

    Args:
        layout: the blocks, a multiple of `cp_size` of them.
        documents: of the layout.
        chunk_bounds: ascending packed positions from 0 to the context length.
        chunk_owner: the rank of every chunk.
        cp_size: P.

    Shape:
        chunk_bounds int64[C + 1], chunk_owner int64[C].
    """
    count = documents.start.size
    place, first_row = documents.first_rows(chunk_bounds, chunk_owner)
    last_block = documents.first_block[place % count + 1]
    attended = np.full(cp_size, layout.num_blocks // cp_size)
    behind = last_block - documents.anchors.searchsorted(first_row, side="right")
    np.add.at(attended, place // count, behind)

    # Of these its own were counted twice.
    sees = np.flatnonzero(documents.of_block >= 0)
    rank = sees * cp_size // layout.num_blocks
    own_place = rank * count + documents.of_block[sees]
    at = np.minimum(place.searchsorted(own_place), place.size - 1)
    twice = (place[at] == own_place) & (first_row[at] < layout.anchor_positions[sees])
    np.subtract.at(attended, rank[twice], 1)
    return int(attended.max())


def _cut_groups(
    layout: BlockLayout,
    context_length: int,
    size: NDArray[np.int64],
    pieces: Pieces,
    chunks_per_rank: int,
    windows: Sequence[int | None],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut every group's rows into equal chunks, J for each of its ranks.

    Args:
        layout: the blocks.
        context_length: S.
        size: ranks of every group.
        pieces: of documents, in groups.
        chunks_per_rank: J.
        windows: of the layers.

    Returns:
        (bounds, chunk of every range between two bounds, work of every chunk), chunks by group.

    Shape:
        size int64[G] -> int64[C + 1], int64[C], int64[P * J].
    """
    start, length, group_rows = _group_rows(pieces, size, context_length)
    chunks = size * chunks_per_rank
    number = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    before = np.repeat(np.cumsum(group_rows) - group_rows, chunks)
    cuts = before + number * np.repeat(group_rows, chunks) // np.repeat(chunks, chunks)
    start, _, chunk_of = _cut(start, length, np.append(cuts, context_length))
    order = np.argsort(start)
    bounds, chunk_of = np.append(start[order], context_length), chunk_of[order]
    work = np.zeros(chunks.sum(), dtype=np.int64)
    np.add.at(work, chunk_of, price_chunks(layout, bounds, windows))
    return bounds, chunk_of, work


def _group_rows(
    pieces: Pieces, size: NDArray[np.int64], context_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All rows of the context by group: pieces where they are, others where rows are few.

    Returns:
        (start of ranges by group and position, their lengths, rows of every group).

    Shape:
        size int64[G] -> int64[R], int64[R], int64[G].
    """
    unseen_start = np.append(0, pieces.end)
    unseen_length = np.append(pieces.start, context_length) - unseen_start
    fill = _level(pieces.rows, size, int(unseen_length.sum()))
    start, length, group = _cut(unseen_start, unseen_length, np.append(0, np.cumsum(fill)))
    start = np.concatenate([pieces.start, start])
    length = np.concatenate([pieces.end - pieces.start, length])
    order = np.lexsort([start, np.concatenate([pieces.group, group])])
    return start[order], length[order], pieces.rows + fill


def _level(rows: NDArray[np.int64], size: NDArray[np.int64], extra: int) -> NDArray[np.int64]:
    """How to pour `extra` rows into groups so that the ranks of the emptiest rise to one level.

    Args:
        rows: of every group.
        size: ranks of every group.
        extra: rows to pour.

    Shape:
        rows, size int64[G] -> int64[G] with the sum `extra`.
    """
    order = np.argsort(rows / size, kind="stable")
    rows_of, ranks_of = rows[order], size[order]
    filled = np.cumsum(rows_of) + extra  # rows of the k + 1 emptiest and all of the extra
    ranks = np.cumsum(ranks_of)
    count = int((rows_of * ranks <= filled * ranks_of).sum())
    ends = ranks[:count] * int(filled[count - 1]) // int(ranks[count - 1])
    level = np.diff(np.append(0, ends))  # to one row, none below `rows`
    poured = np.zeros_like(rows)
    poured[order[:count]] = level - rows_of[:count]
    return poured


def _assign(
    chunk_work: NDArray[np.int64],
    own_work: NDArray[np.int64],
    size: NDArray[np.int64],
    chunks_per_rank: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Balance every group's chunks over its ranks.

    Returns:
        (rank of every chunk, work of every rank).

    Shape:
        chunk_work int64[P * J], own_work int64[P], size int64[G] -> int64[P * J], int64[P].
    """
    owner = np.empty(chunk_work.size, dtype=np.int64)
    end = 0
    for ranks in size.tolist():
        first, end = end, end + ranks
        mine = slice(first * chunks_per_rank, end * chunks_per_rank)
        owner[mine] = first
        if ranks > 1:
            owner[mine] += assign_balanced(chunk_work[mine], own_work[first:end], chunks_per_rank)
    work = own_work.copy()
    np.add.at(work, owner, chunk_work)
    return owner, work


def _cut(
    start: NDArray[np.int64], length: NDArray[np.int64], cuts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lay ranges end to end and cut them also at `cuts`, rows from the beginning of the first.

    Args:
        start: first position of every range.
        length: rows of every range; may be 0.
        cuts: ascending from 0 to the sum of the lengths; may repeat.

    Returns:
        (start, length, i) of every piece that is not empty, in order; it lies between cuts i and
        i + 1.
    """
    start, length = start[length > 0], length[length > 0]
    offset = np.cumsum(length) - length
    edges = np.union1d(offset, cuts)
    begin = edges[:-1]
    source = np.searchsorted(offset, begin, side="right") - 1
    between = np.searchsorted(cuts, begin, side="right") - 1
    return start[source] + begin - offset[source], np.diff(edges), between
