"""Who gets which context chunk: cuts of the packed context and their assignment to ranks."""

import heapq

import numpy as np
from numpy.typing import NDArray


def equal_chunks(context_length: int, num_chunks: int, tile: int = 1) -> NDArray[np.int64]:
    """Bounds of `num_chunks` chunks whose lengths differ by at most one tile.

    Args:
        context_length: S.
        num_chunks: how many.
        tile: rows at whose multiples to cut, if no chunk is shorter than that; the last chunk ends
            with the context all the same.

    Shape:
        -> int64[num_chunks + 1], from 0 to `context_length`; chunks are empty where the context
        is shorter than the number of chunks.
    """
    bounds = np.arange(num_chunks + 1, dtype=np.int64) * context_length // num_chunks
    if tile > 1 and context_length >= num_chunks * tile:
        bounds[1:-1] = (bounds[1:-1] + tile // 2) // tile * tile
    return bounds


def assign_contiguous(num_chunks: int, cp_size: int) -> NDArray[np.int64]:
    """Owners for strategy `none`: every rank takes the next `num_chunks / cp_size` chunks."""
    return np.repeat(np.arange(cp_size, dtype=np.int64), num_chunks // cp_size)


def zigzag_chunks(
    document_bounds: NDArray[np.int64], cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Strategy `zigzag`: 2P chunks a document, rank p takes chunks p and 2P - 1 - p of each.

    Args:
        document_bounds: `[0, ..., context_length]`, strictly ascending but for an empty context.
        cp_size: P.

    Returns:
        (chunk_bounds, chunk_owner) over all documents; a document of fewer than 2P rows has empty
        chunks.

    Shape:
        document_bounds int64[D + 1] -> int64[2PD + 1], int64[2PD].
    """
    half = np.arange(cp_size, dtype=np.int64)
    starts, lengths = document_bounds[:-1], np.diff(document_bounds)
    cuts = np.arange(2 * cp_size, dtype=np.int64)
    bounds = starts[:, None] + cuts * lengths[:, None] // (2 * cp_size)
    owner = np.tile(np.concatenate([half, half[::-1]]), starts.size)
    return np.append(bounds.ravel(), document_bounds[-1]), owner


def recut(
    bounds: NDArray[np.int64], owner: NDArray[np.int64], cp_size: int, chunks_per_rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The same rows on the same ranks, in exactly J chunks a rank: the longest are cut further.

    Args:
        bounds: of the chunks, from 0 to the context length.
        owner: of the chunks.
        cp_size: P.
        chunks_per_rank: J.

    Returns:
        (chunk_bounds, chunk_owner); None where a rank holds more ranges than J, or fewer rows.

    Shape:
        bounds int64[C + 1], owner int64[C] -> int64[P * J + 1], int64[P * J].
    """
    filled = np.flatnonzero(np.diff(bounds))
    first = filled[np.diff(owner[filled], prepend=-1) != 0]  # of chunks that are one range
    start, owner = bounds[first], owner[first]
    length = np.diff(start, append=bounds[-1])
    ranges = np.bincount(owner, minlength=cp_size)
    rows = np.zeros(cp_size, dtype=np.int64)
    np.add.at(rows, owner, length)
    if ranges.max() > chunks_per_rank or rows.min() < chunks_per_rank:
        return None
    lengths, counts = length.tolist(), [1] * length.size
    for mine in np.split(owner.argsort(kind="stable"), np.cumsum(ranges)[:-1]):
        longest = [(-lengths[i], i) for i in mine.tolist()]  # pieces of a range, by their length
        heapq.heapify(longest)
        for _ in range(chunks_per_rank - mine.size):
            i = longest[0][1]
            counts[i] += 1
            heapq.heapreplace(longest, (-lengths[i] / counts[i], i))
    pieces = np.array(counts, dtype=np.int64)
    source = np.repeat(np.arange(start.size), pieces)
    number = np.arange(source.size) - (np.cumsum(pieces) - pieces)[source]
    cuts = start[source] + number * length[source] // pieces[source]
    return np.append(cuts, bounds[-1]), owner[source]


def assign_lpt(
    chunk_work: NDArray[np.int64], cp_size: int, chunks_per_rank: int
) -> NDArray[np.int64]:
    """Strategy `lpt`: the costliest chunk left goes to the least loaded rank with room.

    Every rank receives at most `chunks_per_rank` chunks, and exactly as many if there are P * J.
    Ties go to the chunk, then the rank, of the lowest index, so all ranks compute the same plan.

    Args:
        chunk_work: price of every chunk, not negative.
        cp_size: P.
        chunks_per_rank: J; `chunk_work` has at most P * J entries.

    Returns:
        Owner of every chunk.

    Shape:
        chunk_work int64[C] -> int64[C].

    Source:
        Section 4.2 of the Split-KV paper (cost-aware longest processing time first).
    """
    costliest_first = (-chunk_work).argsort(kind="stable")
    return lpt_with_loads(chunk_work, costliest_first, cp_size, chunks_per_rank)[0]


def lpt_with_loads(
    chunk_work: NDArray[np.int64], order: NDArray[np.int64], cp_size: int, chunks_per_rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`assign_lpt` of chunks in this order, and the work that every rank receives, int64[P].

    LPT serves the ranks once each, from the least loaded up, for as long as none that was served
    is again below one that waits. Such rounds are a few numpy calls; chunks of many documents
    seldom leave them before the last round. From the first other round on a heap decides, until
    only chunks without work are left, which fill up one rank after the other.
    """
    work = chunk_work[order]
    load = np.zeros(cp_size, dtype=np.int64)
    full_rounds = min(chunks_per_rank, int(np.count_nonzero(work)) // cp_size)
    rounds = work[: full_rounds * cp_size].reshape(full_rounds, cp_size)
    ranks, before = serve_in_rounds(rounds, load)
    served = np.minimum.accumulate(before + rounds, axis=1)
    disordered = (served[:, :-1] <= before[:, 1:]).any(axis=1)
    good = int(disordered.argmax()) if disordered.any() else full_rounds
    owner = np.empty_like(order)
    owner[order[: good * cp_size]] = ranks[:good].ravel()
    if good:
        load[ranks[good - 1]] = before[good - 1] + rounds[good - 1]
    if good * cp_size < order.size:
        rest = order[good * cp_size :]
        owner[rest] = _serve_by_heap(chunk_work[rest], load, chunks_per_rank - good)
    return owner, load


def serve_in_rounds(
    rounds: NDArray[np.int64], load: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """In each round the costliest chunk goes to the least loaded rank, the next to the next.

    Args:
        rounds: prices of the chunks, falling within a round.
        load: of every rank before the first round.

    Returns:
        (rank of every chunk, load of that rank before it).

    Shape:
        rounds int64[R, P], load int64[P] -> int64[R, P], int64[R, P].
    """
    load = load.copy()
    ranks, before = np.empty_like(rounds), np.empty_like(rounds)
    for number, work in enumerate(rounds):
        by_load = load.argsort(kind="stable")
        load_before = load[by_load]
        ranks[number], before[number] = by_load, load_before
        load[by_load] = load_before + work
    return ranks, before


def _serve_by_heap(
    work: NDArray[np.int64], load: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    """Ranks of chunks of falling work, one by one; every rank has room for `room`; adds to `load`.

    Shape:
        work int64[n], load int64[P] -> int64[n].
    """
    cp_size = load.size
    left = [room] * cp_size
    # One Python integer orders ranks by load, then by index: half the time that pairs would take.
    least_loaded = [pairs * cp_size + rank for rank, pairs in enumerate(load.tolist())]
    heapq.heapify(least_loaded)
    costly = int(np.count_nonzero(work))
    ranks = []
    for pairs in work[:costly].tolist():
        key = least_loaded[0]
        rank = key % cp_size
        ranks.append(rank)
        left[rank] -= 1
        if left[rank]:
            heapq.heapreplace(least_loaded, key + pairs * cp_size)
        else:
            heapq.heappop(least_loaded)
    np.add.at(load, ranks, work[:costly])
    by_load = load.argsort(kind="stable")
    others = np.repeat(by_load, np.array(left)[by_load])
    return np.append(np.array(ranks, dtype=np.int64), others[: work.size - costly])
