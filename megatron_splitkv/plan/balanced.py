"""Strategy `balanced`: the best of several constructions, then swaps with the most loaded rank.

Balanced differencing (Karmarkar and Karp's idea for bundles of equal count) is ten and more times
closer to even than LPT when chunks are many and alike, and worse when they are few. LPT, which the
ranks' own blocks may join, is good when chunks are few or uneven. Contiguous rows are good hardly
ever, and cost nothing to try. All give every rank exactly J chunks.

Every construction's bundles go to the ranks such that the costliest meets the least work of its
own, which no other matching betters. So `balanced` is never behind `lpt` or `none` on the same
grid. `zigzag` cuts every document by itself and may be luckier: see `build_plan`.

Shape legend: P ranks, J chunks a rank.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.strategies import (
    assign_contiguous,
    lpt_with_loads,
    serve_in_rounds,
)

EVEN = 1e-4
"""An imbalance that needs no mending: far below what a kernel's tiles and a clock leave of it."""

# Bounds on the swaps: how many, comparisons for one of them, and for all together.
_MAX_SWAPS = 64
_MAX_COMPARED = 1 << 11
_MAX_COMPARISONS = 1 << 15


def assign_balanced(
    chunk_work: NDArray[np.int64],
    own_work: NDArray[np.int64],
    chunks_per_rank: int,
) -> NDArray[np.int64]:
    """Owners of the chunks such that all ranks finish together as nearly as we can find.

    Deterministic, ties included: chunks and ranks of equal standing go by their index, and only
    stable sorts decide.

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
    cp_size = own_work.size
    costliest_first = (-chunk_work).argsort(kind="stable")
    rounds = costliest_first.reshape(chunks_per_rank, cp_size)
    bundles, load = _balanced_differencing(chunk_work, rounds)
    candidates = [
        lpt_with_loads(chunk_work, costliest_first, cp_size, chunks_per_rank),
        (assign_contiguous(chunk_work.size, cp_size), chunk_work.reshape(cp_size, -1).sum(axis=1)),
    ]
    if own_work.min() < own_work.max():  # else it is LPT, or nearly
        candidates.append(_lpt_beside_own_work(chunk_work, rounds, own_work))
    most_own = np.sort(own_work)[::-1]
    heaviest = int((load + most_own).max())
    for bundle_of, other_load in candidates:
        if (other := int((np.sort(other_load) + most_own).max())) < heaviest:
            heaviest, load = other, other_load
            bundles = bundle_of.argsort(kind="stable").reshape(cp_size, chunks_per_rank)

    # The lightest bundle to the rank with most work of its own.
    bundle_of_rank = np.empty(cp_size, dtype=np.int64)
    bundle_of_rank[(-own_work).argsort(kind="stable")] = load.argsort(kind="stable")
    bundles = bundles[bundle_of_rank]
    _swap(chunk_work[bundles], load[bundle_of_rank] + own_work, bundles)
    owner = np.empty(chunk_work.size, dtype=np.int64)
    owner[bundles] = np.arange(cp_size)[:, None]
    return owner


def _lpt_beside_own_work(
    work: NDArray[np.int64], rounds: NDArray[np.int64], own_work: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rank of every chunk, work of every rank without its own): LPT in rounds, from own work on.

    Shape:
        work int64[P * J], rounds (of chunks, costliest first) int64[J, P], own_work int64[P]
        -> int64[P * J], int64[P].
    """
    priced = work[rounds]
    ranks, before = serve_in_rounds(priced, own_work)
    owner, load = np.empty_like(work), np.empty_like(own_work)
    owner[rounds] = ranks
    load[ranks[-1]] = before[-1] + priced[-1]
    return owner, load - own_work


def _balanced_differencing(
    work: NDArray[np.int64], rounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(chunks of every bundle, load of every bundle): partial bundles whose differences cancel.

    Each round of P chunks is a partial solution; the two whose bundles differ most are merged, the
    largest bundle of one with the smallest of the other, until one solution is left.

    Args:
        work: price of every chunk.
        rounds: the chunks, costliest first.

    Shape:
        work int64[P * J], rounds int64[J, P] -> int64[P, J], int64[P] ascending.
    """
    num_rounds, cp_size = rounds.shape
    rounds = rounds[:, ::-1]
    loads = list(work[rounds])  # of the bundles of every solution, ascending
    solutions = [(int(load[0] - load[-1]), number) for number, load in enumerate(loads)]
    heapq.heapify(solutions)  # by falling spread, then by age
    # Of every merged solution: the two that it was made of, and which bundle of the first went
    # into each of its own; of the other it was the one as far from the end.
    merged: list[tuple[int, int, NDArray[np.int64]]] = []
    for number in range(num_rounds, 2 * num_rounds - 1):
        one = heapq.heappop(solutions)[1]
        other = solutions[0][1]
        load = loads[one] + loads[other][::-1]
        order = load.argsort(kind="stable")
        load = load[order]
        loads.append(load)
        merged.append((one, other, order))
        heapq.heapreplace(solutions, (int(load[0] - load[-1]), number))

    bundles = np.empty_like(rounds)
    parts = [(len(loads) - 1, np.arange(cp_size))]  # a solution, and where its bundles went
    while parts:
        number, inside = parts.pop()
        if number < num_rounds:
            bundles[number] = rounds[number][inside]
        else:
            one, other, order = merged[number - num_rounds]
            first = order[inside]
            parts += ((one, first), (other, cp_size - 1 - first))
    return bundles.T, loads[-1]


def _swap(owned: NDArray[np.int64], load: NDArray[np.int64], bundles: NDArray[np.int64]) -> None:
    """Exchange chunks of the most loaded rank while that lowers the larger of two loads.

    Not beyond what counts as even.

    Args:
        owned: prices of every rank's chunks; changed in place, as the others are.
        load: work of every rank.
        bundles: chunks of every rank.

    Shape:
        owned, bundles int64[P, J]; load int64[P].
    """
    cp_size, per_rank = owned.shape
    partners = min(cp_size - 1, max(1, _MAX_COMPARED // per_rank**2))
    swaps = min(_MAX_SWAPS, _MAX_COMPARISONS // (partners * per_rank**2)) if partners else 0
    even = (1 + EVEN) * float(load.sum()) / cp_size
    for _ in range(swaps):
        by_load = load.argsort(kind="stable")
        heaviest, lightest = by_load[-1], by_load[:partners]
        if load[heaviest] <= even:
            return
        # What it would hand over on balance, [its chunk, partner's chunk], and by how much the
        # larger of the two loads would then exceed, or undercut, what it has now.
        moved = owned[heaviest][:, None] - owned[lightest].ravel()
        gap = np.repeat(load[heaviest] - load[lightest], per_rank)
        change = np.maximum(-moved, moved - gap)
        mine, theirs = divmod(int(change.argmin()), gap.size)
        if change[mine, theirs] >= 0:
            return
        pairs = moved[mine, theirs]
        other, theirs = lightest[theirs // per_rank], theirs % per_rank
        load[heaviest] -= pairs
        load[other] += pairs
        for table in (owned, bundles):
            table[heaviest, mine], table[other, theirs] = (
                table[other, theirs],
                table[heaviest, mine],
            )
