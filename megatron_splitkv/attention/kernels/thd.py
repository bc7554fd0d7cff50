"""A staircase as varlen calls: every level is one call over ranges of rows, gaps between them.

The format is Transformer Engine's THD with padded starts: sequence i of a call is the rows
`start[i] <= row < start[i] + (cu[i + 1] - cu[i])`, of the queries and of the keys alike. A level's
ranges ascend and do not overlap, so it needs no copy; what lies between them is not read.

Shape legend: Q query rows, K local key rows, M rectangles of a level, W sequences of a call.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.attention.kernels.packed_rows import on_device
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import LeafLimits, Rectangles, Staircase

TILE_LEAF_LIMITS = LeafLimits(keys=4096, tile=128)
"""For kernels with tiles of 128 x 128: what fits about one tile of rows is cheaper masked."""

MAX_ROWS = 2**31 - 1
"""Rows are counted in int32. Offsets of elements are not: cuDNN >= 9.5 takes them as int64."""


@dataclass(frozen=True)
class ThdCall:
    """One level, on the device.

    Args:
        cu_seqlens_q: cumulative lengths of the query ranges.
        cu_seqlens_kv: cumulative lengths of the key ranges.
        starts_q: first row of every query range; Q in the entries that only fill up.
        starts_kv: first row of every key range; K in the entries that only fill up.
        covered: query rows in some range. The kernel writes no statistics for the others.

    Shape:
        int32[W + 1] each; covered bool[Q].
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    starts_q: torch.Tensor
    starts_kv: torch.Tensor
    covered: torch.Tensor


@dataclass(frozen=True)
class ThdCalls:
    """All levels of a staircase, with what they share.

    Args:
        calls: the levels.
        max_seqlen_q: at least the longest query range, a power of two.
        max_seqlen_kv: at least the longest key range, a power of two.
        blind_q: query rows that see nothing; None if there are none.
        unseen_kv: key rows that nothing sees; None if there are none.

    Shape:
        blind_q bool[Q], unseen_kv bool[K].
    """

    calls: list[ThdCall]
    max_seqlen_q: int
    max_seqlen_kv: int
    blind_q: torch.Tensor | None
    unseen_kv: torch.Tensor | None


# Every layer and both directions make the same calls; they are laid out and copied once.
_CALLS: WeakKeyDictionary[Staircase, dict[tuple[int, torch.device], ThdCalls]] = WeakKeyDictionary()


def thd_calls(staircase: Staircase, num_keys: int, device: torch.device) -> ThdCalls:
    """The calls of a staircase, on a device; made once for each.

    Args:
        staircase: what the query rows see.
        num_keys: K.
        device: where the tensors are.

    Raises:
        ConfigError: more rows than int32 counts.
    """
    made = _CALLS.setdefault(staircase, {})
    key = (num_keys, device)
    if key not in made:
        made[key] = _lay_out(staircase, num_keys, device)
    return made[key]


def call_width(num_sequences: int) -> int:
    """W, to which a call of so many sequences is filled up: a power of two from 32 on.

    The number of sequences is part of the key by which Transformer Engine keeps its graphs, and
    these are the steps to which it rounds it where it can.
    """
    return max(32, _power_of_two(num_sequences))


def row_ranges(level: Rectangles, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First row and length of a level's ranges, without rectangles that hold no pair.

    Those are left out because cuDNN answers queries without keys with NaN, and keys without queries
    with wrong gradients, in some of its versions.

    Args:
        level: disjoint, ascending rectangles.
        block_size: B.

    Returns:
        Starts and lengths; in each, queries in row 0 and keys in row 1.

    Shape:
        int64[2, M] both.
    """
    start = np.stack([level.q_start * block_size, level.k_start])
    length = np.stack([level.q_end * block_size, level.k_end]) - start
    holds_pairs = (length > 0).all(axis=0)
    return start[:, holds_pairs], length[:, holds_pairs]


def check_row_count(num_queries: int, num_keys: int) -> None:
    """Refuse more rows than a call can count.

    Raises:
        ConfigError: naming the number and the limit.
    """
    rows = max(num_queries, num_keys)
    if rows > MAX_ROWS:
        raise ConfigError(
            f"{rows} rows on one rank: the attention kernel counts rows in int32, at most "
            f"{MAX_ROWS}; use more context-parallel ranks"
        )


def _lay_out(staircase: Staircase, num_keys: int, device: torch.device) -> ThdCalls:
    num_queries = staircase.num_rows
    check_row_count(num_queries, num_keys)
    all_ranges = [row_ranges(level, staircase.block_size) for level in staircase.levels]
    ranges = [(start, length) for start, length in all_ranges if start.size]
    width = call_width(max((start.shape[1] for start, _ in ranges), default=0))
    longest = np.max([[1, 1], *(length.max(axis=1) for _, length in ranges)], axis=0)
    blind = staircase.row_end <= staircase.row_start
    return ThdCalls(
        calls=[
            _call(start, length, width, num_queries, num_keys, device) for start, length in ranges
        ],
        max_seqlen_q=_power_of_two(int(longest[0])),
        max_seqlen_kv=_power_of_two(int(longest[1])),
        blind_q=on_device(blind, device) if blind.any() else None,
        unseen_kv=_unseen_keys(staircase, num_keys, device),
    )


def _call(
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    width: int,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> ThdCall:
    num_sequences = start.shape[1]
    # Behind the last range lengths are (0, 0) and starts the end of the rows: the one form of an
    # empty sequence that every cuDNN takes.
    starts = np.repeat(np.array([[num_queries], [num_keys]]), width + 1, axis=1)
    starts[:, :num_sequences] = start
    ends = np.cumsum(length, axis=1)
    cumulative = np.repeat(ends[:, -1:], width + 1, axis=1)
    cumulative[:, 0] = 0
    cumulative[:, 1 : num_sequences + 1] = ends
    edges = np.zeros(num_queries + 1, dtype=np.int8)
    edges[start[0]] += 1
    edges[(start + length)[0]] -= 1
    covered = on_device(np.cumsum(edges[:-1]) > 0, device)
    # Tensors of their own: engines may want them aligned.
    cu_q, cu_kv, start_q, start_kv = (
        on_device(row.astype(np.int32), device) for row in (*cumulative, *starts)
    )
    return ThdCall(cu_q, cu_kv, start_q, start_kv, covered)


def _unseen_keys(staircase: Staircase, num_keys: int, device: torch.device) -> torch.Tensor | None:
    sees = staircase.row_end > staircase.row_start
    edges = np.bincount(staircase.row_start[sees], minlength=num_keys + 1)
    edges -= np.bincount(staircase.row_end[sees], minlength=num_keys + 1)
    unseen = np.cumsum(edges[:num_keys]) == 0
    return on_device(unseen, device) if unseen.any() else None


def _power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()
