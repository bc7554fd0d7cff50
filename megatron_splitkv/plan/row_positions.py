"""Where the rows of packed documents lie: orders over ranks, documents by their bounds."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.checks import check_int, int_vector


def zigzag_positions(cu_seqlens: ArrayLike, cp_size: int) -> NDArray[np.int64]:
    """Rows of every rank where each document is cut into 2 P chunks, r and 2 P - 1 - r for rank r.

    With one document it is the order of Megatron's `get_batch_on_this_cp_rank`, with several that
    of packed sequences in Megatron and Transformer Engine.

    Args:
        cu_seqlens: bounds of the documents, ascending from 0.
        cp_size: P; for 1 the rows stay in order.

    Returns:
        Packed positions of every rank's rows, documents in order.

    Shape:
        int64[D + 1] -> int64[P, S / P].

    Raises:
        ConfigError: a document whose rows are not a multiple of 2 P.

    Source:
        `thd_partition_indices_kernel` of Transformer Engine for the order.
    """
    start, rows = mirrored_chunks(document_bounds(cu_seqlens), cp_size)
    first, length = start.reshape(cp_size, -1), rows.repeat(start.shape[2])
    offset = np.cumsum(length) - length
    return (first - offset).repeat(length, axis=1) + np.arange(length.sum())


def mirrored_chunks(
    bounds: NDArray[np.int64], cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunks r and 2 P - 1 - r of every document for every rank r; for P = 1 all of it at once.

    Args:
        bounds: of the documents, checked.
        cp_size: P.

    Returns:
        (first row of every rank's chunks, rows of each chunk of a document).

    Shape:
        bounds int64[D + 1] -> int64[P, D, 2] (int64[1, D, 1] for P = 1), int64[D].

    Raises:
        ConfigError: a document whose rows are not a multiple of 2 P.
    """
    parts = 2 * cp_size if check_int("cp_size", cp_size, 1) > 1 else 1
    rows = np.diff(bounds)
    uneven = np.flatnonzero(rows % parts)
    if uneven.size:
        i = int(uneven[0])
        name = f"document {i}" if rows.size > 1 else "the sequence"
        raise ConfigError(
            f"{name} has {rows[i]} rows, no multiple of {parts} (2 x {cp_size} context-parallel "
            f"ranks); pad it to {-(-rows[i] // parts) * parts}"
        )
    rank = np.arange(cp_size)
    which = np.stack([rank, parts - 1 - rank], axis=1)[:, : min(parts, 2)]
    return bounds[:-1, None] + which[:, None, :] * (rows // parts)[:, None], rows // parts


def even_positions(num_documents: int, rows: int, cp_size: int) -> NDArray[np.int64]:
    """Rows of every rank where it holds `rows` consecutive ones of each document.

    Args:
        num_documents: D.
        rows: rows of a document that a rank holds.
        cp_size: P.

    Shape:
        int64[P, D * rows]; a document has P * rows rows.
    """
    document, rank = np.arange(num_documents) * rows * cp_size, np.arange(cp_size) * rows
    first = document[None, :, None] + rank[:, None, None]
    return (first + np.arange(rows)).reshape(cp_size, -1)


def document_bounds(cu_seqlens: ArrayLike | int) -> NDArray[np.int64]:
    """Document bounds, checked; a number is one document."""
    bounds = int_vector("cu_seqlens", cu_seqlens)
    if bounds.ndim == 0:
        bounds = np.array([0, bounds])
    if bounds.ndim != 1 or bounds.size < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ConfigError(
            "cu_seqlens must be a vector that ascends from 0, with two entries or more"
        )
    return bounds


def real_rows(lengths: ArrayLike, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Real rows of the documents, checked."""
    real = int_vector("real rows of the documents", lengths)
    if real.shape != (bounds.size - 1,) or (real < 0).any() or (real > np.diff(bounds)).any():
        raise ConfigError(
            "the real rows of the documents must be one number for each, from 0 to the rows "
            "between its (padded) bounds"
        )
    return real


def documents_of(
    positions: NDArray[np.int64], bounds: NDArray[np.int64], name: str
) -> NDArray[np.int64]:
    """The document of every position."""
    if positions.size and not 0 <= positions.min() <= positions.max() < bounds[-1]:
        raise ConfigError(
            f"{name} run from {positions.min()} to {positions.max()}, the documents from 0 to "
            f"{bounds[-1] - 1}"
        )
    return np.searchsorted(bounds, positions, side="right") - 1


def searchsorted_runs(keys: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """`np.searchsorted`, quick where many neighbours among the values are equal."""
    if values.size == 0:
        return np.zeros(0, dtype=np.int64)
    first = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return np.searchsorted(keys, values[first]).repeat(np.diff(np.append(first, values.size)))


def are_prefixes(start: NDArray[np.int64], end: NDArray[np.int64]) -> bool:
    """Whether ranges that begin at different keys have no key in common."""
    sees = start < end
    start, end = start[sees], end[sees]
    if start.size == 0:
        return True
    first = np.flatnonzero(np.append(True, start[1:] != start[:-1]))
    start, end = start[first], np.maximum.reduceat(end, first)
    order = np.lexsort([end, start])
    start, end = start[order], end[order]
    return bool(((start[1:] == start[:-1]) | (end[:-1] <= start[1:])).all())
