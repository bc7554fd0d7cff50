"""The plan of one micro-batch: which rank holds which context rows and which draft blocks.

Pure data, computed on every rank alike before any tensor moves. It is made of chunk bounds and
owners; rows and key ranges are derived from them when asked for, so a context of any length costs
no more than its chunks and blocks.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import BLOCK_ORDERS, ConfigError, require_choice
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.attention_plan import AttentionPlan
from megatron_splitkv.plan.band import build_band_staircase, check_window
from megatron_splitkv.plan.checks import check_layout, check_windows, int_vector
from megatron_splitkv.plan.own_blocks import own_block_staircase
from megatron_splitkv.plan.pricing import (
    FULL_ATTENTION,
    price_chunks,
    price_own_blocks,
    window_starts,
)
from megatron_splitkv.plan.staircase import LeafLimits, Staircase, build_staircase


@dataclass(frozen=True, eq=False)
class ContextPlan(AttentionPlan):
    """Owners of the context chunks and of the draft blocks of one packed micro-batch.

    "Local" rows are a rank's context rows in ascending global order. Blocks are owned in the order
    of the plan's layout, N / P consecutive ones a rank, so an all-gather over ranks yields that
    order. It is that of documents and anchors, unless `block_order` says otherwise.

    Args:
        layout: the blocks, padded to a multiple of `cp_size`, in the order of their owners.
        chunk_bounds: global packed positions, ascending from 0 to the context length; chunk j is
            `[chunk_bounds[j], chunk_bounds[j + 1])` and may be empty.
        chunk_owner: the rank of every chunk.
        cp_size: P, ranks of the context-parallel group.
        strategy: how the owners were found.
        windows: attention windows of the layers whose work is counted, one entry each; None is
            full attention. The plan serves layers of any window.
        block_order: how blocks were dealt out: `contiguous` or `mirrored`, see `build_plan`.
        chunk_prices: `chunk_work` for who has computed it; no field, so `replace` forgets it.

    Shape:
        chunk_bounds int64[C + 1]; chunk_owner, chunk_prices int64[C].
    """

    layout: BlockLayout
    chunk_bounds: NDArray[np.int64]
    chunk_owner: NDArray[np.int64]
    cp_size: int
    strategy: str
    windows: tuple[int | None, ...] = FULL_ATTENTION
    block_order: str = "contiguous"
    chunk_prices: InitVar[NDArray[np.int64] | None] = None

    def __post_init__(self, chunk_prices: NDArray[np.int64] | None) -> None:
        for name in ("chunk_bounds", "chunk_owner"):
            object.__setattr__(self, name, int_vector(name, getattr(self, name)).copy())
        if chunk_prices is not None:
            object.__setattr__(self, "chunk_work", chunk_prices)  # fills the cached property
        bounds, owner = self.chunk_bounds, self.chunk_owner
        if bounds.size != owner.size + 1 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ConfigError(
                "chunk_bounds must ascend from 0 and have one entry more than chunk_owner"
            )
        if owner.size and not 0 <= owner.min() <= owner.max() < self.cp_size:
            raise ConfigError(f"chunk_owner must name ranks in [0, {self.cp_size})")
        object.__setattr__(self, "windows", check_windows(self.windows))
        require_choice("block order", self.block_order, BLOCK_ORDERS)
        if self.layout.num_blocks % self.cp_size:
            raise ConfigError(
                f"{self.layout.num_blocks} blocks do not divide among {self.cp_size} ranks; "
                "build_plan pads them"
            )
        check_layout(self.layout, self.context_length)

    @property
    def context_length(self) -> int:
        """S, context rows over all ranks."""
        return int(self.chunk_bounds[-1])

    @property
    def block_size(self) -> int:
        """B, slots of a draft block."""
        return self.layout.block_size

    @property
    def num_blocks(self) -> int:
        """N, padding blocks included."""
        return self.layout.num_blocks

    # Rows and blocks of a rank

    def row_ranges(self, rank: int) -> NDArray[np.int64]:
        """The rank's context rows as maximal global ranges, for reading from storage.

        Shape:
            int64[k, 2] of half-open ranges, ascending, none empty, no two adjacent.
        """
        start, end = self._chunks_of(rank)
        start, end = start[start < end], end[start < end]
        joint = np.flatnonzero(start[1:] == end[:-1])
        return np.stack([np.delete(start, joint + 1), np.delete(end, joint)], axis=1)

    def rows(self, rank: int) -> NDArray[np.int64]:
        """The rank's context rows as global packed positions, ascending; made anew at each call.

        Shape:
            int64[num_rows(rank)].
        """
        start, end = self.row_ranges(rank).T
        lengths = end - start
        local_start = np.cumsum(lengths) - lengths
        return np.repeat(start - local_start, lengths) + np.arange(lengths.sum())

    def num_rows(self, rank: int) -> int:
        """How many context rows the rank holds."""
        start, end = self._chunks_of(rank)
        return int((end - start).sum())

    def blocks(self, rank: int) -> NDArray[np.int64]:
        """Indices of the blocks whose queries, own keys and loss belong to the rank, ascending.

        Shape:
            int64[N / P].
        """
        self._check_rank(rank)
        per_rank = self.layout.num_blocks // self.cp_size
        return np.arange(rank * per_rank, (rank + 1) * per_rank)

    def block_positions(self) -> NDArray[np.int64]:
        """Position inside its document of every slot of every block, in layout order.

        Shape:
            int64[N * B].
        """
        first = self.layout.anchor_positions - self.layout.document_starts
        return (first[:, None] + np.arange(self.block_size)).ravel()

    # What a rank's keys are to the blocks

    def key_ranges(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every block's visible context on the rank, as a range of local rows.

        Returns:
            (start, end), half open; empty where the rank holds nothing that the block sees, and
            (0, 0) for padding blocks.

        Shape:
            int64[N], int64[N] in layout order.
        """
        keep = self.layout.block_keep_mask
        start = self._local_rows_before(rank, self.layout.document_starts)
        end = self._local_rows_before(rank, self.layout.anchor_positions)
        return np.where(keep, start, 0), np.where(keep, end, 0)

    def needs(self, window: int | None = None) -> NDArray[np.bool_]:
        """Whether a rank holds context that a block sees, by the chunks that the block's touches.

        Shape:
            bool[P, N].

        Raises:
            ConfigError: the window is less than 1.
        """
        check_window(window)
        filled = np.flatnonzero(np.diff(self.chunk_bounds))
        bounds, owner = self.chunk_bounds[filled], self.chunk_owner[filled]
        held = np.zeros((filled.size + 1, self.cp_size), dtype=np.int64)
        held[np.arange(1, filled.size + 1), owner] = 1
        np.cumsum(held, axis=0, out=held)  # chunks of each rank before a chunk
        start, end = self.layout.document_starts, self.layout.anchor_positions
        if window is not None:
            start = np.maximum(start, end - window + 1)  # of slot 0, which sees furthest back
        first = np.maximum(np.searchsorted(bounds, start, side="right") - 1, 0)
        after = np.searchsorted(bounds, end)
        seen = (held[np.maximum(after, first)] > held[first]).T
        return seen & (self.layout.block_keep_mask & (start < end))

    def build_staircase(
        self, rank: int, blocks: NDArray[np.int64], limits: LeafLimits, window: int | None
    ) -> Staircase:
        """See `AttentionPlan.staircase`."""
        check_window(window)
        start, end = self.key_ranges(rank)
        if window is None:
            return build_staircase(start[blocks], end[blocks], self.block_size, limits)
        row_start = self._window_starts(rank, window)[blocks]
        return build_band_staircase(row_start.ravel(), end[blocks], self.block_size, limits)

    def build_own_staircase(self, rank: int, window: int | None) -> Staircase:
        """See `AttentionPlan.own_staircase`."""
        check_window(window)
        keep = self.layout.block_keep_mask[self.blocks(rank)]
        return own_block_staircase(keep, self.block_size, window)

    # Work

    @cached_property
    def chunk_work(self) -> NDArray[np.int64]:
        """Query-key pairs of every chunk over all layers, int64[C]."""
        return price_chunks(self.layout, self.chunk_bounds, self.windows)

    @cached_property
    def context_work(self) -> NDArray[np.int64]:
        """Query-key pairs that every rank computes against its context rows, int64[P]."""
        work = np.zeros(self.cp_size, dtype=np.int64)
        np.add.at(work, self.chunk_owner, self.chunk_work)
        return work

    @cached_property
    def work(self) -> NDArray[np.int64]:
        """`context_work` and the pairs of the kept blocks that the rank owns, int64[P]."""
        return self.context_work + price_own_blocks(self.layout, self.cp_size, self.windows)

    @cached_property
    def imbalance(self) -> float:
        """max(work) / mean(work) - 1; 0 where there is no work at all."""
        total = int(self.work.sum())
        return int(self.work.max()) * self.cp_size / total - 1.0 if total else 0.0

    # Identity and transport

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all but the strategy: equal on all ranks, or the plans differ."""
        content = hashlib.sha256()
        arrays = self.to_arrays()
        for name in sorted(arrays.keys() - {"strategy"}):
            array = arrays[name]
            content.update(f"{name}:{array.size};".encode())
            content.update(array.astype("<i8").tobytes())
        return content.hexdigest()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The plan as vectors that a DataLoader can collate; `from_arrays` is the inverse."""
        return {
            "chunk_bounds": self.chunk_bounds,
            "chunk_owner": self.chunk_owner,
            "anchor_positions": self.layout.anchor_positions,
            "document_starts": self.layout.document_starts,
            "block_keep_mask": self.layout.block_keep_mask,
            "block_size": np.array([self.layout.block_size], dtype=np.int64),
            "cp_size": np.array([self.cp_size], dtype=np.int64),
            "windows": np.array([window or 0 for window in self.windows], dtype=np.int64),
            "strategy": np.frombuffer(self.strategy.encode(), dtype=np.uint8).copy(),
            "block_order": np.frombuffer(self.block_order.encode(), dtype=np.uint8).copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Self:
        """Rebuild a plan from `to_arrays`, from numpy arrays or CPU tensors alike.

        Args:
            arrays: the vectors, each with or without the leading batch dimension of 1 that a
                collate function adds; other entries are ignored.

        Raises:
            ConfigError: an entry is missing, or several plans were collated into one.
        """

        def vector(name: str) -> NDArray[Any]:
            if name not in arrays:
                raise ConfigError(f"the plan's arrays lack {name!r}; make them with to_arrays()")
            array = np.asarray(arrays[name])
            if array.ndim == 2 and array.shape[0] == 1:
                return array[0]
            if array.ndim != 1:
                raise ConfigError(
                    f"the plan's {name!r} has shape {array.shape}; a batch holds one plan "
                    "(--micro-batch-size 1)"
                )
            return array

        return cls(
            layout=BlockLayout(
                vector("anchor_positions"),
                vector("document_starts"),
                vector("block_keep_mask"),
                int(vector("block_size")[0]),
            ),
            chunk_bounds=vector("chunk_bounds"),
            chunk_owner=vector("chunk_owner"),
            cp_size=int(vector("cp_size")[0]),
            strategy=bytes(vector("strategy")).decode(),
            windows=tuple(window or None for window in vector("windows").tolist()),
            block_order=bytes(vector("block_order")).decode(),
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ConfigError(f"rank {rank} is not in [0, {self.cp_size}) of this plan")

    def _chunks_of(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self._check_rank(rank)
        mine = np.flatnonzero(self.chunk_owner == rank)
        return self.chunk_bounds[mine], self.chunk_bounds[mine + 1]

    def _window_starts(self, rank: int, window: int) -> NDArray[np.int64]:
        """First local row that every slot sees; 0 for padding blocks.

        Shape:
            int64[N, B].
        """
        first = window_starts(
            self.layout.anchor_positions, self.layout.document_starts, self.block_size, window
        )
        keep = self.layout.block_keep_mask[:, None]
        return np.where(keep, self._local_rows_before(rank, first), 0)

    def _local_rows_before(self, rank: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the rank's rows lie before each global position."""
        start, end = self._chunks_of(rank)
        if start.size == 0:
            return np.zeros_like(positions)
        lengths = end - start
        local_start = np.cumsum(lengths) - lengths
        chunk = np.maximum(np.searchsorted(start, positions, side="right") - 1, 0)
        inside = np.clip(positions - start[chunk], 0, lengths[chunk])
        return local_start[chunk] + inside
