"""Who gets which context chunk: cuts of the packed context and their assignment to ranks."""

import heapq

import numpy as np
from numpy.typing import NDArray


def equal_chunks(context_length: int, num_chunks: int) -> NDArray[np.int64]:
    """Bounds of `num_chunks` chunks whose lengths differ by at most one row.

    Shape:
        -> int64[num_chunks + 1], from 0 to `context_length`; chunks are empty where the context
        is shorter than the number of chunks.
    """
    return np.arange(num_chunks + 1, dtype=np.int64) * context_length // num_chunks


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


def assign_lpt(
    chunk_work: NDArray[np.int64], cp_size: int, chunks_per_rank: int
) -> NDArray[np.int64]:
    """Strategy `lpt`: the costliest chunk left goes to the least loaded rank with room.

    Every rank receives exactly `chunks_per_rank` chunks. Ties go to the chunk, then the rank, of
    the lowest index, so all ranks compute the same plan.

    Args:
        chunk_work: price of every chunk.
        cp_size: P.
        chunks_per_rank: J; `chunk_work` has P * J entries.

    Returns:
        Owner of every chunk.

    Shape:
        chunk_work int64[P * J] -> int64[P * J].

    Source:
        Section 4.2 of the Split-KV paper (cost-aware longest processing time first).
    """
    order = np.argsort(-chunk_work, kind="stable").tolist()
    work = chunk_work.tolist()
    owner = np.empty(len(work), dtype=np.int64)
    room = [chunks_per_rank] * cp_size
    least_loaded = [(0, rank) for rank in range(cp_size)]
    for chunk in order:
        load, rank = least_loaded[0]
        owner[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(least_loaded, (load + work[chunk], rank))
        else:
            heapq.heappop(least_loaded)
    return owner
