"""Strategy `balanced`: the better of two constructions, then swaps with the most loaded rank.

Round-wise LPT (in each round the costliest chunks left meet the least loaded ranks) is good when
chunks are few or uneven. Balanced differencing (Karmarkar and Karp's idea for bundles of equal
count) is about ten times closer to even when chunks are many and alike, and worse when they are
few. Both give every rank exactly J chunks, and both are a handful of numpy calls a round.

Shape legend: P ranks, J chunks a rank.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

# Bounds on the swaps: rounds, and (P * J * J) comparisons over all rounds.
_MAX_SWAPS = 64
_MAX_COMPARISONS = 1 << 19


def assign_balanced(
    chunk_work: NDArray[np.int64],
    own_work: NDArray[np.int64],
    chunks_per_rank: int,
) -> NDArray[np.int64]:
    """Owners of the chunks such that all ranks finish together as nearly as we can find.

    Deterministic, ties included: chunks and ranks of equal standing go by their index.

    Args:
        chunk_work: price of every chunk.
        own_work: work that every rank has anyway, from the blocks that it owns.
        chunks_per_rank: J.

    Returns:
        Owner of every chunk; every rank owns J.

    Shape:
        chunk_work int64[P * J], own_work int64[P] -> int64[P * J].

    Source:
        W. Michiels, J. Korst, E. Aarts, J. van Leeuwen, "Performance ratios for the differencing
        method applied to the balanced number partitioning problem" (the BLDM method).
    """
    by_rounds = _round_wise_lpt(chunk_work, own_work, chunks_per_rank)
    by_differences = _balanced_differencing(chunk_work, own_work, chunks_per_rank)
    bundles = min(
        (by_rounds, by_differences), key=lambda b: int((chunk_work[b].sum(1) + own_work).max())
    )
    bundles = _swap(chunk_work, own_work, bundles)
    owner = np.empty(chunk_work.size, dtype=np.int64)
    owner[bundles] = np.arange(own_work.size)[:, None]
    return owner


def _round_wise_lpt(
    work: NDArray[np.int64], own_work: NDArray[np.int64], chunks_per_rank: int
) -> NDArray[np.int64]:
    """Chunks of every rank, int64[P, J]: in each round the costliest goes to the least loaded."""
    rounds = np.argsort(-work, kind="stable").reshape(chunks_per_rank, -1)
    load = own_work.copy()
    bundles = np.empty((own_work.size, chunks_per_rank), dtype=np.int64)
    for number, chunks in enumerate(rounds):
        ranks = np.argsort(load, kind="stable")
        bundles[ranks, number] = chunks
        load[ranks] += work[chunks]
    return bundles


def _balanced_differencing(
    work: NDArray[np.int64], own_work: NDArray[np.int64], chunks_per_rank: int
) -> NDArray[np.int64]:
    """Chunks of every rank, int64[P, J]: partial bundles are merged so that differences cancel.

    Each round of P chunks is a partial solution; the two whose bundles differ most are merged, the
    largest bundle of one with the smallest of the other, until one solution is left.
    """
    rounds = np.argsort(-work, kind="stable").reshape(chunks_per_rank, -1)
    # (minus the spread, age) decides; what follows is never compared.
    solutions = [
        (-int(work[chunks[0]] - work[chunks[-1]]), age, work[chunks], chunks[:, None])
        for age, chunks in enumerate(rounds)
    ]
    heapq.heapify(solutions)
    age = len(solutions)
    while len(solutions) > 1:
        _, _, loads, bundles = heapq.heappop(solutions)
        _, _, other_loads, other_bundles = heapq.heappop(solutions)
        loads = loads + other_loads[::-1]
        bundles = np.concatenate([bundles, other_bundles[::-1]], axis=1)
        order = np.argsort(-loads, kind="stable")
        loads, bundles = loads[order], bundles[order]
        heapq.heappush(solutions, (-int(loads[0] - loads[-1]), age, loads, bundles))
        age += 1
    # Bundles lie by falling load: the heaviest goes to the rank with the least work of its own.
    by_rank = np.empty_like(solutions[0][3])
    by_rank[np.argsort(own_work, kind="stable")] = solutions[0][3]
    return by_rank


def _swap(
    work: NDArray[np.int64], own_work: NDArray[np.int64], bundles: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Exchange single chunks with the most loaded rank while that lowers the larger of two loads.

    Shape:
        bundles int64[P, J] -> int64[P, J].
    """
    bundles = bundles.copy()
    priced = work[bundles]
    load = priced.sum(axis=1) + own_work
    ranks, per_rank = bundles.shape
    for _ in range(min(_MAX_SWAPS, _MAX_COMPARISONS // max(1, priced.size * per_rank))):
        heaviest = int(load.argmax())
        # What the heaviest rank would hand over on balance: [rank, its chunk, the other's chunk].
        moved = priced[heaviest][None, :, None] - priced[:, None, :]
        larger = np.maximum(load[heaviest] - moved, load[:, None, None] + moved)
        larger[heaviest] = load[heaviest]
        best = int(larger.argmin())
        if larger.flat[best] >= load[heaviest]:
            break
        other, mine, theirs = np.unravel_index(best, (ranks, per_rank, per_rank))
        gain = moved[other, mine, theirs]
        load[heaviest] -= gain
        load[other] += gain
        for table in (bundles, priced):
            table[heaviest, mine], table[other, theirs] = (
                table[other, theirs],
                table[heaviest, mine],
            )
    return bundles
