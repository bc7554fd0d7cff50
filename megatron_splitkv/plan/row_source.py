"""Where context rows already are before a plan moves them: the layout of somebody else's tensors.

An online target, or any tensor that Megatron has split, comes in Megatron's own order over the
context-parallel ranks. A source says which one it is; features that every rank reads from a store
have none.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.checks import check_int, int_vector
from megatron_splitkv.plan.row_positions import document_bounds, mirrored_chunks, real_rows


@dataclass(frozen=True, eq=False)
class RowSource:
    """Ranges of global context rows in the order in which the ranks' tensors hold them.

    Padding that a tensor has between documents, and a plan has not, is a range below zero: [-n, 0)
    stands for n rows that are no context.

    Args:
        start: first row of every range, by rank, and within a rank in the order of its tensor.
        end: end of every range; empty ranges are allowed and dropped.
        owner: the rank that holds the range, ascending.
        cp_size: P; ranks may hold nothing.

    Shape:
        start, end, owner int64[k]; global packed positions, half open.

    Raises:
        ConfigError: the ranges are not by rank, or do not hold every row from 0 on exactly once.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    owner: NDArray[np.int64]
    cp_size: int

    def __post_init__(self) -> None:
        start, end, owner = (
            int_vector(f"{name} of a row source", getattr(self, name))
            for name in ("start", "end", "owner")
        )
        if not start.shape == end.shape == owner.shape == (start.size,):
            raise ConfigError("start, end and owner of a row source must be vectors of one length")
        object.__setattr__(self, "cp_size", check_int("cp_size", self.cp_size, 1))
        if owner.size and not 0 <= owner.min() <= owner.max() < self.cp_size:
            raise ConfigError(f"the owners of a row source must be ranks in [0, {self.cp_size})")
        if (np.diff(owner) < 0).any():
            raise ConfigError("the ranges of a row source must be listed by rank, ascending")
        if (start > end).any() or ((start < 0) & (end > 0)).any():
            raise ConfigError(
                "a range of a row source ends before it starts, or is half padding (below zero)"
            )
        filled = start < end
        for name, array in (("start", start), ("end", end), ("owner", owner)):
            object.__setattr__(self, name, array[filled])
        context = self.start >= 0
        first, last = np.sort(self.start[context]), np.sort(self.end[context])
        if first.size and (first[0] != 0 or (first[1:] != last[:-1]).any()):
            raise ConfigError(
                "the ranges of a row source must hold every row from 0 on exactly once"
            )

    @classmethod
    def contiguous(cls, context_length: int, cp_size: int) -> Self:
        """Rank p holds the p-th of P equal parts.

        Args:
            context_length: S.
            cp_size: P.

        Raises:
            ConfigError: S is no multiple of P.
        """
        _check_length(context_length, cp_size)
        if context_length % cp_size:
            raise ConfigError(
                f"the context has {context_length} rows, no multiple of {cp_size} context-parallel "
                f"ranks; pad it to {-(-context_length // cp_size) * cp_size}"
            )
        part = context_length // cp_size
        rank = np.arange(cp_size)
        return cls(rank * part, (rank + 1) * part, rank, cp_size)

    @classmethod
    def zigzag(cls, context_length: int, cp_size: int) -> Self:
        """Rank p holds chunks p and 2 P - 1 - p of 2 P equal ones, in that order.

        Args:
            context_length: S.
            cp_size: P; for 1 the rows are in order.

        Raises:
            ConfigError: S is no multiple of 2 P.

        Source:
            `get_batch_on_this_cp_rank` of Megatron, without `cu_seqlens` or with
            `use_per_sequence_balancing`.
        """
        _check_length(context_length, cp_size)
        return cls._mirrored(np.array([0, context_length]), cp_size)

    @classmethod
    def zigzag_documents(
        cls, cu_seqlens: ArrayLike, cp_size: int, *, lengths: ArrayLike | None = None
    ) -> Self:
        """Rank p holds chunks p and 2 P - 1 - p of every document, documents in order.

        Args:
            cu_seqlens: bounds of the documents with their padding, ascending from 0; repeated
                bounds are empty documents.
            cp_size: P; for 1 the rows are in order.
            lengths: real rows of every document, if the plan's context is made of these alone, end
                to end. None if padding is part of the context.

        Shape:
            cu_seqlens int64[D + 1]; lengths int64[D].

        Raises:
            ConfigError: the bounds do not ascend from 0, a document is no multiple of 2 P, or has
                more real rows than there are.

        Source:
            `get_batch_on_this_cp_rank` of Megatron with packed `cu_seqlens`;
            `thd_get_partitioned_indices` of Transformer Engine.
        """
        bounds = document_bounds(cu_seqlens)
        padded = cls._mirrored(bounds, cp_size)
        return padded if lengths is None else padded._without(bounds, real_rows(lengths, bounds))

    @property
    def context_length(self) -> int:
        """S, context rows over all ranks, padding not counted."""
        return max(0, int(self.end.max())) if self.end.size else 0

    def ranges(self, rank: int) -> NDArray[np.int64]:
        """The rank's rows as ranges in the order of its tensor.

        Shape:
            int64[k, 2] of half-open ranges.
        """
        mine = self._ranges_of(rank)
        return np.stack([self.start[mine], self.end[mine]], axis=1)

    def rows(self, rank: int) -> NDArray[np.int64]:
        """The rank's rows as global packed positions in the order of its tensor; made anew.

        Rows of padding are negative.

        Shape:
            int64[num_rows(rank)].
        """
        start, end = self.ranges(rank).T
        lengths = end - start
        local_start = np.cumsum(lengths) - lengths
        return np.repeat(start - local_start, lengths) + np.arange(lengths.sum())

    def num_rows(self, rank: int) -> int:
        """How many rows the rank's tensor has, padding included."""
        mine = self._ranges_of(rank)
        return int((self.end[mine] - self.start[mine]).sum())

    @cached_property
    def local_start(self) -> NDArray[np.int64]:
        """Where every range begins in its rank's tensor, int64[k]."""
        lengths = self.end - self.start
        before = np.cumsum(lengths) - lengths
        return before - before[np.searchsorted(self.owner, self.owner)] if lengths.size else before

    def _ranges_of(self, rank: int) -> slice:
        if not 0 <= rank < self.cp_size:
            raise ConfigError(f"rank {rank} is not in [0, {self.cp_size}) of this row source")
        return slice(*np.searchsorted(self.owner, [rank, rank + 1]).tolist())

    @classmethod
    def _mirrored(cls, bounds: NDArray[np.int64], cp_size: int) -> Self:
        start, rows = mirrored_chunks(bounds, cp_size)
        rank = np.arange(cp_size).repeat(start[0].size)
        return cls(start.ravel(), (start + rows[:, None]).ravel(), rank, cp_size)

    def _without(self, bounds: NDArray[np.int64], lengths: NDArray[np.int64]) -> Self:
        """Positions among real rows alone; what was padding of a document is padding."""
        document = np.searchsorted(bounds, self.start, side="right") - 1
        real_end = np.clip(bounds[document] + lengths[document], self.start, self.end)
        shift = bounds[document] - (np.cumsum(lengths) - lengths)[document]
        context = np.stack([self.start - shift, real_end - shift], axis=1)
        padding = np.stack([real_end - self.end, np.zeros_like(real_end)], axis=1)
        start, end = np.stack([context, padding], axis=1).reshape(-1, 2).T
        return type(self)(start, end, self.owner.repeat(2), self.cp_size)


def _check_length(context_length: int, cp_size: int) -> None:
    check_int("cp_size", cp_size, 1)
    check_int("context_length", context_length, 0)
