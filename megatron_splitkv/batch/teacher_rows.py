"""What the target itself would have said: its final hidden state for every slot that is trained.

Anchors overlap, so several slots want the same row; each row is read, or sent, once a rank.

Shape legend: Q slots of this rank's blocks, d hidden size.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.comm import group_rank, launch_all_to_all
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.row_source import RowSource


def read_teacher_rows(
    positions: NDArray[np.int64],
    read_final_hidden: Callable[[NDArray[np.int64]], torch.Tensor],
) -> torch.Tensor:
    """Rows of a store, by slot.

    Args:
        positions: packed position of every slot's row, below zero where nothing is trained.
        read_final_hidden: reads rows of half-open global ranges, int64[k, 2] -> [rows, d].

    Returns:
        The rows, zeros where nothing is trained.

    Shape:
        ``positions [Q]``; the result ``[Q, d]``.

    Raises:
        ConfigError: the reader returns other rows than asked for.
    """
    rows, slots = _wanted(positions)
    first = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
    ends = rows[np.append(first, rows.size)[1:] - 1] + 1
    found = read_final_hidden(np.stack([rows[first], ends], axis=1))
    if found.dim() != 2 or found.shape[0] != rows.size:
        raise ConfigError(
            f"read_final_hidden returned shape {tuple(found.shape)} for {rows.size} rows; it must "
            "return [rows, hidden size]"
        )
    return _by_slot(found, rows, slots, positions)


def fetch_teacher_rows(
    positions: Sequence[NDArray[np.int64]],
    source: RowSource,
    final_hidden: torch.Tensor,
    cp_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Rows that are computed in the job, where each rank holds others: one all-to-all-v.

    No gradient flows back: a teacher is not taught.

    Args:
        positions: of every rank's slots, as for `read_teacher_rows`; known without a word.
        source: who holds which rows.
        final_hidden: this rank's rows in the source's order.
        cp_group: the ranks; None for one process.

    Returns:
        This rank's rows by slot, zeros where nothing is trained, on the device of `final_hidden`.

    Shape:
        ``positions [P][Q]``, ``final_hidden [source.num_rows(rank), d]``; the result ``[Q, d]``.

    Raises:
        ConfigError: `final_hidden` has another number of rows than the source says.
    """
    rank = group_rank(cp_group)
    if final_hidden.dim() != 2 or final_hidden.shape[0] != source.num_rows(rank):
        raise ConfigError(
            f"final_hidden has shape {tuple(final_hidden.shape)} on this rank; it must be [rows, "
            f"hidden size] with {source.num_rows(rank)} rows, like the features"
        )
    wanted = [_wanted(of_rank) for of_rank in positions]
    leaving = []
    for rows, _ in wanted:
        owner, local = _holders(source, rows)
        leaving.append(local[owner == rank])
    rows, slots = wanted[rank]
    owner, _ = _holders(source, rows)
    index = torch.from_numpy(np.concatenate(leaving)).to(final_hidden.device)
    arrived = launch_all_to_all(
        final_hidden.detach().index_select(0, index),
        cp_group,
        label="teacher_hidden",
        sent_rows=[part.size for part in leaving],
        received_rows=np.bincount(owner, minlength=source.cp_size).tolist(),
    ).wait()
    # They come by owner; each owner's in ascending order.
    found = torch.empty_like(arrived)
    order = torch.from_numpy(np.argsort(owner, kind="stable")).to(arrived.device)
    found[order] = arrived
    return _by_slot(found, rows, slots, positions[rank])


def _wanted(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that are wanted, ascending, and for every trained slot the index of its row."""
    rows, slots = np.unique(positions[positions >= 0], return_inverse=True)
    return rows, slots


def _by_slot(
    found: torch.Tensor,
    rows: NDArray[np.int64],
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> torch.Tensor:
    """One row a slot; the one behind the last is zeros, for slots that are not trained."""
    index = np.full(positions.shape, rows.size, dtype=np.int64)
    index[positions >= 0] = slots
    padded = torch.cat([found, found.new_zeros(1, found.shape[1])])
    return padded.index_select(0, torch.from_numpy(index).to(found.device))


def _holders(
    source: RowSource, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank that holds each row, and where in its tensor."""
    order = np.argsort(source.start, kind="stable")
    held = order[np.searchsorted(source.start[order], rows, side="right") - 1]
    return source.owner[held], source.local_start[held] + rows - source.start[held]
