"""Documents to groups of consecutive ranks: a group's work is about what its ranks should do.

Shape legend: P ranks, G groups, D documents with work.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.strategies import assign_lpt

# In layout order documents are parted where the work so far is a whole number of ranks, or this
# far from one.
_CUT_TOLERANCES = (0.5, 0.25, 0.1, 0.05)
# A rank that is filled up with documents may get this much more or less than its share.
_FILL_TOLERANCE = 0.02


@dataclass(frozen=True, eq=False)
class RankGroups:
    """Which documents go to which group, and how many ranks a group has.

    Args:
        group_of: group of every document; groups are numbered as their ranks are.
        size: ranks of every group.

    Shape:
        group_of int64[D]; size int64[G], with the sum P.
    """

    group_of: NDArray[np.int64]
    size: NDArray[np.int64]

    @property
    def first_rank(self) -> NDArray[np.int64]:
        """Of every group, int64[G]."""
        return np.cumsum(self.size) - self.size

    @property
    def of_rank(self) -> NDArray[np.int64]:
        """Group of every rank, int64[P]."""
        return np.repeat(np.arange(self.size.size), self.size)

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sums over every group of a value of every document, int64[D] -> int64[G]."""
        sums = np.zeros(self.size.size, dtype=np.int64)
        np.add.at(sums, self.group_of, values)
        return sums


def possible_groups(work: NDArray[np.int64], cp_size: int) -> list[RankGroups]:
    """Ways to form two groups or more, each once.

    In layout order, parted where the work so far is near a whole number of ranks; the costliest
    documents, whose last rank is filled up with smaller ones; equal groups by LPT.

    Args:
        work: of every document, not all 0.
        cp_size: P.
    """
    ways = [*_in_order(work, cp_size), _filled_up(work, cp_size), *_equal(work, cp_size)]
    unique = {(way.group_of.tobytes(), way.size.tobytes()): way for way in ways}
    return [way for way in unique.values() if way.size.size > 1]


def _in_order(work: NDArray[np.int64], cp_size: int) -> Iterator[RankGroups]:
    so_far = np.cumsum(_in_ranks(work, cp_size))[:-1]
    cut = np.rint(so_far).astype(np.int64)
    off = np.abs(so_far - cut)
    by_cut = np.lexsort([off, cut])  # of several documents that end near a cut the nearest counts
    nearest = by_cut[np.unique(cut[by_cut], return_index=True)[1]]
    nearest = nearest[(cut[nearest] > 0) & (cut[nearest] < cp_size)]
    for tolerance in _CUT_TOLERANCES:
        last = nearest[off[nearest] <= tolerance]  # document before every cut
        size = np.diff(np.concatenate([[0], cut[last], [cp_size]]))
        yield RankGroups(np.searchsorted(last, np.arange(work.size)), size)


def _filled_up(work: NDArray[np.int64], cp_size: int) -> RankGroups:
    left = np.argsort(-work, kind="stable").tolist()
    falling = (-_in_ranks(work, cp_size)[left]).tolist()  # ascending, for bisection
    group_of = np.zeros(work.size, dtype=np.int64)
    sizes: list[int] = []
    while left:
        ranks_left = cp_size - sum(sizes)
        size = min(ranks_left, max(1, int(np.ceil(-falling[0] * (1 - _FILL_TOLERANCE)))))
        room = max(size * (1 + _FILL_TOLERANCE), -falling[0]) if size < ranks_left else np.inf
        while (i := bisect_left(falling, -room)) < len(left):
            group_of[left.pop(i)] = len(sizes)
            room += falling.pop(i)
        sizes.append(size)
    sizes[-1] += cp_size - sum(sizes)
    return _by_first_document(group_of, np.array(sizes, dtype=np.int64))


def _equal(work: NDArray[np.int64], cp_size: int) -> Iterator[RankGroups]:
    for groups in range(min(cp_size, int(np.count_nonzero(work))), 1, -1):
        if cp_size % groups == 0:
            size = np.full(groups, cp_size // groups, dtype=np.int64)
            yield _by_first_document(assign_lpt(work, groups, work.size), size)


def _in_ranks(work: NDArray[np.int64], cp_size: int) -> NDArray[np.float64]:
    """How many ranks' work every document is."""
    return work.astype(np.float64) * (cp_size / float(work.sum()))


def _by_first_document(group_of: NDArray[np.int64], size: NDArray[np.int64]) -> RankGroups:
    """Number the groups by their first document; all have one."""
    _, first = np.unique(group_of, return_index=True)
    order = np.argsort(first)
    return RankGroups(np.argsort(order)[group_of], size[order])
