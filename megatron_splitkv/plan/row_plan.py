"""The plan of ordinary attention: query rows and keys in any order over the ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.attention_plan import AttentionPlan
from megatron_splitkv.plan.band import build_band_staircase, check_window
from megatron_splitkv.plan.row_positions import (
    are_prefixes,
    document_bounds,
    documents_of,
    real_rows,
    searchsorted_runs,
)
from megatron_splitkv.plan.staircase import LeafLimits, Staircase, build_staircase


@dataclass(frozen=True, eq=False)
class RowPlan(AttentionPlan):
    """Which range of keys every query row sees, and which rank holds which keys.

    Blocks are single rows and have no keys of their own apart. Attention wants a rank's query rows
    ordered by the range that they see and its keys by position: then a rank's rows are at most P
    staircases, whatever the order of its tensors. Where that order is another, `query_order` and
    `key_order` say how to permute them (q, k, v and the output are then copied once each). Hidden
    keys amid those that a row sees are left out by `key_order` too.

    Args:
        key_start: first visible key of every query row, as a position among all keys; rank-major,
            a rank's rows in the order of its tensor, equally many a rank.
        key_end: end of the visible keys; equal to `key_start` where a row sees nothing.
        key_positions: for every rank, the positions of its keys in the order of its tensors; no
            position twice. Positions that nobody holds are no keys.
        causal: the last key that a row sees is its own; needed for windows.
        hidden: for a rank, which of its keys no query sees, in the order of its tensors. Each rank
            need know its own only: it changes nothing that travels.

    Shape:
        key_start, key_end int64[Q]; key_positions P vectors int64; hidden bool vectors.

    Raises:
        ConfigError: the parts do not fit each other.
    """

    key_start: NDArray[np.int64]
    key_end: NDArray[np.int64]
    key_positions: tuple[NDArray[np.int64], ...]
    causal: bool = False
    hidden: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start, end = (np.asarray(x, dtype=np.int64) for x in (self.key_start, self.key_end))
        keys = tuple(np.asarray(x, dtype=np.int64) for x in self.key_positions)
        object.__setattr__(self, "key_start", start)
        object.__setattr__(self, "key_end", end)
        object.__setattr__(self, "key_positions", keys)
        if start.ndim != 1 or start.shape != end.shape or (start > end).any():
            raise ConfigError(
                "key_start and key_end must be equally long vectors with key_start <= key_end"
            )
        if not keys or start.size % len(keys):
            raise ConfigError(
                f"{start.size} query rows do not divide among {len(keys)} ranks; "
                "every rank must own equally many rows: pad them"
            )
        positions = np.sort(np.concatenate(keys))
        twice = np.flatnonzero(positions[1:] == positions[:-1])
        if twice.size:
            raise ConfigError(
                f"key {positions[twice[0]]} is held twice; every key must be held by one rank"
            )
        for rank, hidden in self.hidden.items():
            if hidden.shape != keys[rank].shape:
                raise ConfigError(
                    f"rank {rank} holds {keys[rank].size} keys, `hidden` names {hidden.size}"
                )

    # Constructors

    @classmethod
    def of_causal(
        cls,
        positions: ArrayLike,
        cu_seqlens: ArrayLike | None = None,
        *,
        lengths: ArrayLike | None = None,
    ) -> Self:
        """Causal self-attention of packed documents whose rows lie anywhere.

        Args:
            positions: position of every row in the packed sequence, a line a rank, in the order of
                the rank's tensors: `zigzag_positions`, `even_positions` or any other order.
            cu_seqlens: bounds of the documents, ascending from 0; None: one document.
            lengths: real rows of every document if it ends in padding, which sees nothing and is
                not seen.

        Shape:
            positions int64[P, Q / P], cu_seqlens int64[D + 1], lengths int64[D].
        """
        rows = np.asarray(positions, dtype=np.int64)
        if rows.ndim != 2:
            raise ConfigError(
                f"positions has shape {rows.shape}; give a line of equally many rows for each rank"
            )
        bounds = document_bounds(rows.size if cu_seqlens is None else cu_seqlens)
        document = documents_of(rows.ravel(), bounds, "positions")
        start, row = bounds[document], rows.ravel()
        if lengths is None:
            real = np.ones(row.size, dtype=np.bool_)
        else:
            real = row - start < real_rows(lengths, bounds)[document]
        # A blind row's empty range lies at its own position, so that it keeps its place there.
        return cls(np.where(real, start, row), np.where(real, row + 1, row), tuple(rows), True)

    @classmethod
    def of_documents(
        cls,
        query_positions: ArrayLike,
        key_positions: Sequence[ArrayLike] | NDArray[np.int64],
        cu_seqlens_q: ArrayLike,
        cu_seqlens_kv: ArrayLike,
        *,
        lengths_q: ArrayLike | None = None,
        lengths_kv: ArrayLike | None = None,
    ) -> Self:
        """Every query row of a document sees all keys of that document: cross-attention.

        Args:
            query_positions: position of every query row among all query rows, a line a rank, in
                the order of the rank's tensor.
            key_positions: positions of every rank's keys among all keys.
            cu_seqlens_q: bounds of the documents' query rows, ascending from 0.
            cu_seqlens_kv: bounds of the documents' keys.
            lengths_q: real query rows of every document if it ends in padding, which sees nothing.
            lengths_kv: real keys of every document if it ends in padding, which is not seen.

        Shape:
            query_positions int64[P, Q / P], cu_seqlens int64[D + 1], lengths int64[D].
        """
        rows = np.asarray(query_positions, dtype=np.int64)
        if rows.ndim != 2:
            raise ConfigError(
                f"query positions have shape {rows.shape}; give a line of equally many rows for "
                "each rank"
            )
        query_bounds, key_bounds = document_bounds(cu_seqlens_q), document_bounds(cu_seqlens_kv)
        if query_bounds.size != key_bounds.size:
            raise ConfigError(
                f"{query_bounds.size - 1} documents of queries and {key_bounds.size - 1} of keys; "
                "cu_seqlens_q and cu_seqlens_kv must be equally long"
            )
        document = documents_of(rows.ravel(), query_bounds, "query positions")
        seen = np.diff(key_bounds) if lengths_kv is None else real_rows(lengths_kv, key_bounds)
        start, end = key_bounds[document], (key_bounds[:-1] + seen)[document]
        if lengths_q is not None:
            real = rows.ravel() - query_bounds[document]
            end = np.where(real < real_rows(lengths_q, query_bounds)[document], end, start)
        keys = tuple(np.asarray(x, dtype=np.int64) for x in key_positions)
        for positions in keys:
            documents_of(positions, key_bounds, "key positions")
        return cls(start, end, keys)

    def with_hidden(self, rank: int, hidden: ArrayLike) -> Self:
        """The same plan without some keys of a rank; see `hidden`."""
        if not 0 <= rank < self.cp_size:
            raise ConfigError(f"rank {rank} is not in [0, {self.cp_size}) of this plan")
        mask = np.array(hidden, dtype=np.bool_)
        return dataclasses.replace(self, hidden={**self.hidden, rank: mask})

    def check_window(self, window: int | None) -> None:
        """Refuse a window where there is nothing to measure it from.

        Raises:
            ConfigError: the window is less than 1, or the rows are not causal.
        """
        check_window(window)
        if window is not None and not self.causal:
            raise ConfigError(f"window {window}: only causal rows have a window; pass window=None")

    # AttentionPlan

    @property
    def cp_size(self) -> int:  # type: ignore[override]
        """P."""
        return len(self.key_positions)

    @property
    def block_size(self) -> int:
        """Blocks are single rows."""
        return 1

    @property
    def num_blocks(self) -> int:
        """Q, query rows of all ranks."""
        return int(self.key_start.size)

    @property
    def num_keys(self) -> int:
        """S, keys of all ranks."""
        return sum(keys.size for keys in self.key_positions)

    def num_rows(self, rank: int) -> int:
        """How many keys the rank holds."""
        return int(self.key_positions[rank].size)

    def query_order(self, rank: int) -> NDArray[np.int64] | None:
        """Which row of the rank's query tensor comes i-th here; None: they lie as wanted.

        Shape:
            int64[Q / P].
        """
        order = self._row_order
        if order is None:
            return None
        rows = slice(rank * self.blocks_per_rank, (rank + 1) * self.blocks_per_rank)
        own = order[rows] - rows.start
        return None if (own[1:] > own[:-1]).all() else own

    def key_order(self, rank: int) -> NDArray[np.int64] | None:
        """Which row of the rank's key tensor comes i-th here; None: they lie as wanted.

        Shape:
            int64, at most num_rows(rank) of them.
        """
        if self._hides_amid(rank):
            return self._sorted_keys(rank)[self._seen(rank)]
        keys = self.key_positions[rank]
        return None if (keys[1:] > keys[:-1]).all() else self._sorted_keys(rank)

    def key_ranges(
        self, rank: int, window: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every row's visible keys on the rank, as a half-open range of its keys by position.

        Args:
            rank: whose keys.
            window: a row sees that many keys at most, its own included; None: no limit.

        Shape:
            int64[Q], int64[Q], rank-major in the order of `query_order`.

        Raises:
            ConfigError: a window but no `causal`.
        """
        return self._kept(("ranges", rank, window), lambda: self._local_ranges(rank, window))

    def needs(self, window: int | None = None) -> NDArray[np.bool_]:
        """Whether a rank holds keys that a row sees, `hidden` ones counted.

        Shape:
            bool[P, Q].
        """
        start, end = self._ranges(window)
        needs = np.zeros((self.cp_size, start.size), dtype=np.bool_)
        for rank, positions in enumerate(self.key_positions):
            keys = np.append(np.sort(positions), np.iinfo(np.int64).max)
            needs[rank] = keys[searchsorted_runs(keys[:-1], start)] < end
        return needs

    def build_staircase(
        self, rank: int, blocks: NDArray[np.int64], limits: LeafLimits, window: int | None
    ) -> Staircase:
        """See `AttentionPlan.staircase`."""
        start, end = (x[blocks] for x in self.key_ranges(rank, window))
        build = build_staircase if are_prefixes(start, end) else build_band_staircase
        return build(start, end, 1, limits)

    def build_own_staircase(self, rank: int, window: int | None) -> None:
        """See `AttentionPlan.own_staircase`: rows have no keys apart."""
        return

    def _local_ranges(
        self, rank: int, window: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, end = self._held(rank, window)
        if rank not in self.hidden:
            return start, end
        seen = self._seen(rank)
        first, after = np.searchsorted(seen, start), np.searchsorted(seen, end)
        if self._hides_amid(rank):
            return first, after  # among the keys that are not hidden
        seen = np.append(seen, self.num_rows(rank))  # for rows that see nothing
        return seen[first], np.where(after > first, seen[after - 1] + 1, seen[first])

    def _held(self, rank: int, window: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every row's range of the rank's keys by position, hidden ones too."""
        start, end = self._ranges(window)
        keys = self.key_positions[rank][self._sorted_keys(rank)]
        return searchsorted_runs(keys, start), np.searchsorted(keys, end)

    def _hides_amid(self, rank: int) -> bool:
        """Whether some row sees keys of the rank on both sides of a hidden one."""
        if rank not in self.hidden:
            return False

        def hides() -> bool:
            start, end = self._held(rank, None)
            seen = self._seen(rank)
            first, after = np.searchsorted(seen, start), np.searchsorted(seen, end)
            some = after > first
            stretch = seen[after[some] - 1] + 1 - seen[first[some]]
            return bool((stretch != (after - first)[some]).any())

        return self._kept(("hides amid", rank), hides)

    def _sorted_keys(self, rank: int) -> NDArray[np.int64]:
        return self._kept(("order", rank), lambda: np.argsort(self.key_positions[rank]))

    def _seen(self, rank: int) -> NDArray[np.int64]:
        """The rank's keys that are not hidden, counted by position."""
        return np.flatnonzero(~self.hidden[rank][self._sorted_keys(rank)])

    def _ranges(self, window: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`key_start` and `key_end` in the order of `query_order`, within the window."""
        start, end = self.key_start, self.key_end
        if self._row_order is not None:
            start, end = start[self._row_order], end[self._row_order]
        self.check_window(window)
        if window is None:
            return start, end
        return np.maximum(start, end - window), end

    @cached_property
    def _row_order(self) -> NDArray[np.int64] | None:
        """Every rank's rows by the range that they see; None if no rank's need be moved."""
        start = self.key_start.reshape(self.cp_size, -1)
        end = self.key_end.reshape(self.cp_size, -1)
        ascends = (start[:, 1:] > start[:, :-1]) | (
            (start[:, 1:] == start[:, :-1]) & (end[:, 1:] >= end[:, :-1])
        )
        if ascends.all():
            return None
        rank = np.arange(self.num_blocks) // self.blocks_per_rank
        return np.lexsort([self.key_end, self.key_start, rank])
