"""Megatron's own micro-batch, as its `get_batch_on_this_tp_rank` gives it, in this package's terms.

For an online target that runs under Megatron: the tokens come from Megatron's loader and the hidden
states lie where its context parallelism puts them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.plan.row_source import RowSource


def pack_from_megatron(
    batch: Mapping[str, torch.Tensor | None], document_ids: Sequence[int] | NDArray[np.integer]
) -> Pack:
    """Documents, tokens and supervision of a whole micro-batch, before any context-parallel split.

    Megatron's loss mask says of a position whether its label, the next token, is trained; a pack's
    says it of the token itself. Padding between documents is left out where `cu_seqlens_padded`
    tells it apart; otherwise it is part of the documents, never supervised and never seen.

    Args:
        batch: `tokens`, `loss_mask` and, for packed documents, `cu_seqlens` and perhaps
            `cu_seqlens_padded`; the same on every rank that shares the micro-batch.
        document_ids: identity of every document in its data set: anchors are drawn by it.

    Shape:
        tokens int64[1, S]; loss_mask [1, S]; cu_seqlens int32[1, n], filled up with its last value.

    Raises:
        ConfigError: a micro-batch of several samples, or another number of documents.
    """
    tokens, loss_mask = _needed(batch, "tokens"), _needed(batch, "loss_mask")
    bounds, lengths = _documents(batch)
    ids = np.asarray(document_ids, dtype=np.int64)
    if ids.shape != lengths.shape:
        raise ConfigError(
            f"{ids.size} document_ids for {lengths.size} documents in the micro-batch's cu_seqlens;"
            " give one for each"
        )
    supervised = np.append(False, loss_mask[:-1] > 0)
    supervised[bounds[:-1][lengths > 0]] = False  # nothing in its document predicts a first token
    inside = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    real = np.flatnonzero(inside < np.repeat(lengths, np.diff(bounds)))
    return Pack(
        document_ids=ids,
        cu_seqlens=np.append(0, np.cumsum(lengths)),
        token_ids=tokens[real].astype(np.int64),
        loss_mask=supervised[real],
    )


def row_source_from_megatron(
    batch: Mapping[str, torch.Tensor | None],
    cp_size: int,
    *,
    use_per_sequence_balancing: bool = False,
) -> RowSource:
    """Where `get_batch_on_this_cp_rank` of Megatron puts the rows of a micro-batch.

    Args:
        batch: as for `pack_from_megatron`.
        cp_size: P.
        use_per_sequence_balancing: as in Megatron's function.

    Raises:
        ConfigError: rows or documents that Megatron cannot split among so many ranks.
    """
    rows = _needed(batch, "tokens").size
    bounds, lengths = _documents(batch)
    whole = batch.get("cu_seqlens") is None or use_per_sequence_balancing
    in_documents = int(lengths.sum() if whole else bounds[-1])
    if in_documents != rows:
        raise ConfigError(
            f"the micro-batch has {rows} tokens, {in_documents} of them in documents; cu_seqlens "
            "must end where the tokens do, and padding between documents (cu_seqlens_padded) goes "
            "with per-document balancing"
        )
    if whole:
        return RowSource.zigzag(rows, cp_size)
    return RowSource.zigzag_documents(bounds, cp_size, lengths=lengths)


def _documents(
    batch: Mapping[str, torch.Tensor | None],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bounds of the documents with their padding, and their real rows."""
    cu_seqlens, padded = _row(batch, "cu_seqlens"), _row(batch, "cu_seqlens_padded")
    if cu_seqlens is None:
        rows = _needed(batch, "tokens").size
        return np.array([0, rows]), np.array([rows])
    bounds = cu_seqlens if padded is None else padded
    # The filling repeats the last bound; real documents end where it first comes.
    count = int(np.argmax(bounds == bounds[-1]))
    end: NDArray[np.int64] = cu_seqlens[: count + 1].astype(np.int64)
    return bounds[: count + 1].astype(np.int64), np.diff(end)


def _needed(batch: Mapping[str, torch.Tensor | None], name: str) -> NDArray[Any]:
    array = _row(batch, name)
    if array is None:
        raise ConfigError(f"the micro-batch lacks {name!r}; all of Megatron's loaders give it")
    return array


def _row(batch: Mapping[str, torch.Tensor | None], name: str) -> NDArray[Any] | None:
    """An entry of the batch without its batch dimension, on the host."""
    tensor = batch.get(name)
    if tensor is None:
        return None
    if tensor.dim() != 2 or tensor.shape[0] != 1:
        raise ConfigError(
            f"{name} of the micro-batch has shape {tuple(tensor.shape)}; it must be one pack of "
            "documents, [1, n] (--micro-batch-size 1)"
        )
    array: NDArray[Any] = tensor[0].cpu().numpy()
    return array
