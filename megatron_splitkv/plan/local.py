"""Strategy `balanced-local`: the chunks of a document stay within a few consecutive ranks.

Draft blocks then meet their keys on a part of the ranks only, and with query cast `group` they
travel nowhere else. The ranks are cut into as many equal groups as balance allows; each document
goes to one group, and within a group the plan is that of `balanced`.

Blocks are owned in layout order, so groups take documents in that order where they can: the ranks
that hold a document's keys are then those that own its blocks.

Context rows that no block sees cost memory and nothing else. They go wherever rows are fewest.

Shape legend: P ranks, J chunks a rank, G groups, D documents with work, N blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.balanced import assign_balanced
from megatron_splitkv.plan.pricing import cumulative_context_work, price_chunks, price_own_blocks
from megatron_splitkv.plan.strategies import assign_lpt, equal_chunks

# Percent of the busiest rank's work under `balanced`. The works of equal documents of 512 anchors
# differ by some 2 % from draw to draw, and those of 128 anchors by 4 %: less would refuse groups
# that nothing but luck tells apart; more would cost more attention than the traffic is worth.
_WORK_BOUND = 105
# Percent of an even share of the context. Keys and values are what a rank's memory is spent on, and
# documents of equal work may differ in length: even rows are not given up for more than this.
_ROWS_BOUND = 150


@dataclass(frozen=True, eq=False)
class _Documents:
    """Documents of which blocks see something, by position: the rows seen, and their price.

    Shape:
        start, end, work int64[D].
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    work: NDArray[np.int64]


def local_chunks(
    layout: BlockLayout, context_length: int, cp_size: int, chunks_per_rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut and assign the context such that each document stays within a group of ranks.

    The most groups are taken under which no rank has more than 1.05 times the work of the busiest
    rank of `balanced`, nor more than 1.5 times an even share of the rows (and J). One group is
    `balanced` itself. Deterministic.

    Args:
        layout: the blocks, a multiple of `cp_size` of them.
        context_length: S.
        cp_size: P.
        chunks_per_rank: J.

    Returns:
        (chunk_bounds, chunk_owner). A rank has J chunks of its group's rows, equally long but for
        one row; one that runs over the end of what a group holds in a piece is two or more here.

    Shape:
        -> int64[C + 1], int64[C].
    """
    own_work = price_own_blocks(layout, cp_size)
    bounds = equal_chunks(context_length, cp_size * chunks_per_rank)
    chunk_work = price_chunks(layout, bounds)
    owner = assign_balanced(chunk_work, own_work, chunks_per_rank)
    load = own_work.copy()
    np.add.at(load, owner, chunk_work)
    most_work = int(load.max()) * _WORK_BOUND // 100
    most_rows = -(-context_length // cp_size) * _ROWS_BOUND // 100

    documents = _documents(layout)
    for groups in range(min(cp_size, documents.work.size), 1, -1):
        if cp_size % groups:
            continue
        for group_of in _partitions(documents.work, groups):
            group_work = own_work.reshape(groups, -1).sum(axis=1)
            np.add.at(group_work, group_of, documents.work)
            ranges = _group_rows(documents, group_of, groups, context_length)
            group_rows = np.zeros(groups, dtype=np.int64)
            np.add.at(group_rows, ranges[2], ranges[1])
            size = cp_size // groups
            if group_work.max() > most_work * size or group_rows.max() > most_rows * size:
                continue  # not even with perfect balance inside the group
            grouped_bounds, grouped_owner, work = _assign(
                layout, ranges, group_rows, own_work, chunks_per_rank
            )
            if work.max() <= most_work:
                return grouped_bounds, grouped_owner
    return bounds, owner


def _documents(layout: BlockLayout) -> _Documents:
    """The documents with work; their ranges end with the last key that is seen.

    Padding blocks and blocks in any order are allowed.
    """
    keep = layout.block_keep_mask
    start, document = np.unique(layout.document_starts[keep], return_inverse=True)
    end = start.copy()
    np.maximum.at(end, document, layout.anchor_positions[keep])
    seen = end > start
    start, end = start[seen], end[seen]
    work = cumulative_context_work(layout, end) - cumulative_context_work(layout, start)
    return _Documents(start, end, work)


def _partitions(work: NDArray[np.int64], groups: int) -> Iterator[NDArray[np.int64]]:
    """Ways to give every document a group, int64[D] each: in layout order, then by LPT.

    In layout order a document belongs where the middle of its work lies among all work. LPT is
    closer to even where documents differ, and its groups are numbered by their first document.
    """
    pairs = work.tolist()
    total, before, in_order = sum(pairs), 0, []
    for price in pairs:  # Python integers: the products may exceed int64
        in_order.append((2 * before + price) * groups // (2 * total))
        before += price
    yield np.array(in_order, dtype=np.int64)

    by_lpt = assign_lpt(work, groups, work.size)
    _, first = np.unique(by_lpt, return_index=True)
    yield np.argsort(np.argsort(first))[by_lpt]


def _group_rows(
    documents: _Documents, group_of: NDArray[np.int64], groups: int, context_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Every context row's group: documents where `group_of` says, other rows where rows are few.

    Returns:
        (start, length, group) of ranges that cover the context once, by group and position.

    Shape:
        three int64[R].
    """
    length = documents.end - documents.start
    rows = np.zeros(groups, dtype=np.int64)
    np.add.at(rows, group_of, length)
    unseen_start = np.append(0, documents.end)
    unseen_length = np.append(documents.start, context_length) - unseen_start
    fill = _level(rows, int(unseen_length.sum()))
    pieces, piece_length, piece_group = _cut(
        unseen_start, unseen_length, np.append(0, np.cumsum(fill))
    )
    start = np.concatenate([documents.start, pieces])
    group = np.concatenate([group_of, piece_group])
    order = np.lexsort([start, group])
    return start[order], np.concatenate([length, piece_length])[order], group[order]


def _level(rows: NDArray[np.int64], extra: int) -> NDArray[np.int64]:
    """How to pour `extra` rows into the groups so that the emptiest rise to one level.

    Shape:
        rows int64[G] -> int64[G] with the sum `extra`.
    """
    order = np.argsort(rows, kind="stable")
    filled = np.cumsum(rows[order]) + extra  # rows of the k + 1 emptiest and all of the extra
    count = int((rows[order] * np.arange(1, rows.size + 1) <= filled).sum())
    level = np.diff(equal_chunks(int(filled[count - 1]), count))  # to one row, none below `rows`
    poured = np.zeros_like(rows)
    poured[order[:count]] = level - rows[order[:count]]
    return poured


def _assign(
    layout: BlockLayout,
    ranges: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    group_rows: NDArray[np.int64],
    own_work: NDArray[np.int64],
    chunks_per_rank: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut every group's rows into equal chunks and balance them over the group's ranks.

    Args:
        layout: the blocks.
        ranges: from `_group_rows`.
        group_rows: rows of every group.
        own_work: work that every rank has anyway.
        chunks_per_rank: J.

    Returns:
        (chunk_bounds, chunk_owner, work of every rank).

    Shape:
        group_rows int64[G], own_work int64[P] -> int64[C + 1], int64[C], int64[P].
    """
    start, length, _ = ranges
    cp_size, groups = own_work.size, group_rows.size
    size = cp_size // groups
    per_group = size * chunks_per_rank
    first = np.cumsum(group_rows) - group_rows
    cuts = first[:, None] + np.arange(per_group) * group_rows[:, None] // per_group
    piece_start, _, chunk_of = _cut(start, length, np.append(cuts, group_rows.sum()))
    order = np.argsort(piece_start)
    chunk_of = chunk_of[order]
    bounds = np.append(piece_start[order], group_rows.sum())

    chunk_work = np.zeros(groups * per_group, dtype=np.int64)
    np.add.at(chunk_work, chunk_of, price_chunks(layout, bounds))
    owner = np.repeat(np.arange(groups) * size, per_group)
    if size > 1:
        by_group = chunk_work.reshape(groups, -1), own_work.reshape(groups, -1)
        for group, (chunks, own) in enumerate(zip(*by_group, strict=True)):
            owner[group * per_group :][:per_group] += assign_balanced(chunks, own, chunks_per_rank)
    work = own_work.copy()
    np.add.at(work, owner, chunk_work)
    return bounds, owner[chunk_of], work


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
