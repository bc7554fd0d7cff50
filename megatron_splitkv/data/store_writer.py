"""Writing a feature store so that a crash at any moment leaves no half of one.

Every file is written aside, synced and renamed, and the index comes last: until `close` returns, a
reader finds no store.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.frozen import FROZEN_FILE, holds_frozen, write_frozen_file
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.partial import full_disk_explained, remove_dead_partials
from megatron_splitkv.data.shard import PARTIAL_SUFFIX, ShardEntry, ShardLayout
from megatron_splitkv.data.shard_plan import plan_shards
from megatron_splitkv.data.shard_writer import (
    SIDECAR_SUFFIX,
    ShardWriter,
    check_states,
    check_tokens,
    read_sidecar,
    sidecar,
)
from megatron_splitkv.data.store_index import INDEX_FILE, StoreIndex

MAX_SHARD_BYTES = 1 << 29
_ANEW = "write the store anew"
_RESUMES = "give the same command again: it goes on behind the shards that are finished"

# Token ids, loss mask, features, final hidden states.
_Document = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class StoreBuilder:
    """A store whose documents' lengths are known, made shard by shard in any order.

    Any number of processes may hold one for the same folder at once, on any machine that sees it,
    and any of them may be killed: a shard that is finished says so in a sidecar beside it, which
    names the plan that it belongs to. Who asks `missing` and writes those shards resumes. Shards
    are functions of their documents: two processes that write the same one do no harm.

    Args:
        path: folder to create; it must not hold a finished store.
        meta: target, tapped layers, dtype.
        lengths: tokens of each document.
        max_shard_bytes: see `plan_shards`.

    Attributes:
        bounds: int64 ``[num_shards + 1]``; shard k holds the documents ``bounds[k]`` to
            ``bounds[k + 1]``.

    Raises:
        ConfigError: the folder already holds a store, no document, or an empty one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        lengths: ArrayLike,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self.meta = meta
        self.lengths = np.asarray(lengths, dtype=np.int64)
        _check_not_empty(self.path, self.lengths.size)
        self.bounds = plan_shards(self.lengths, meta.row_bytes, max_shard_bytes)
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._rows = np.diff(starts[self.bounds])
        described = json.dumps([meta.to_json(), self.bounds.tolist()]).encode()
        self._plan = hashlib.sha256(described + self.lengths.tobytes()).hexdigest()
        _make_folder(self.path)
        remove_dead_partials(self.path)

    @property
    def num_shards(self) -> int:
        """Shards of the whole store."""
        return len(self.bounds) - 1

    def missing(self) -> list[int]:
        """Shards that are still to be written: without a file of the size that a sidecar says.

        The files' content is not read.
        """
        return [shard for shard in range(self.num_shards) if not self.finished(shard)]

    def finished(self, shard: int) -> bool:
        """Whether one shard is there; see `missing`."""
        return read_sidecar(self._file(shard), self._plan) is not None

    def open_shard(
        self, shard: int, token_ids: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor]
    ) -> ShardWriter:
        """Begin one shard, whether it is there already or not.

        Args:
            shard: its number.
            token_ids: ids of each of its documents.
            loss_masks: True where a token is supervised.

        Shape:
            token_ids, loss_masks: ``[n]``, n the document's length.

        Raises:
            ConfigError: other lengths than planned, a token outside the vocabulary, a full disk.
        """
        first, last = self.bounds[shard : shard + 2].tolist()
        planned, found = self.lengths[first:last].tolist(), [int(ids.numel()) for ids in token_ids]
        if found != planned:
            raise ConfigError(
                f"shard {shard} is planned for documents {first} to {last} with {planned} tokens, "
                f"got {found}"
            )
        return ShardWriter(
            self._file(shard),
            self.meta,
            token_ids,
            loss_masks,
            first_document=first,
            plan=self._plan,
            bytes_to_come=self.bytes_to_come,
            what_then=_RESUMES,
        )

    def bytes_to_come(self) -> int:
        """Bytes of the shards that are missing."""
        return sum(self._layout(shard).end for shard in self.missing())

    def write_frozen(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Store the target's frozen embedding and head, unless just these are there.

        Shape:
            embedding, head: ``[vocab_size, d]``, in the dtype that training shall use.

        Raises:
            ConfigError: another shape, or a full disk.
        """
        path, tensors = self.path / FROZEN_FILE, (self.meta.target, embedding, head)
        if read_sidecar(path, self._plan) is None or not holds_frozen(self.path, *tensors):
            with full_disk_explained(self.path, _RESUMES, self.bytes_to_come):
                entry = write_frozen_file(self.path, *tensors)
                with sidecar(path, self._plan, entry):
                    pass

    def close(self) -> None:
        """Write the index of all shards, which makes the folder a store; then tidy it.

        Raises:
            ConfigError: naming shards that are missing.
        """
        entries = [read_sidecar(self._file(shard), self._plan) for shard in range(self.num_shards)]
        missing = [self._file(shard).name for shard, entry in enumerate(entries) if entry is None]
        if missing and (self.path / INDEX_FILE).exists():
            return  # another process has closed it meanwhile
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"{self.path} is no store yet: {len(missing)} of {self.num_shards} shards are "
                f"missing ({', '.join(missing[:3])}{more}); {_RESUMES}"
            )
        shards = tuple(ShardEntry.from_json(entry) for entry in entries if entry is not None)
        frozen = read_sidecar(self.path / FROZEN_FILE, self._plan)
        with full_disk_explained(self.path, _RESUMES):
            StoreIndex(self.meta, shards, frozen).write(self.path)
        tidy_store(self.path)

    def _file(self, shard: int) -> Path:
        return self.path / _shard_name(shard)

    def _layout(self, shard: int) -> ShardLayout:
        meta = self.meta
        return ShardLayout.of(
            int(self._rows[shard]), meta.feature_width, meta.dtype, meta.final_width
        )


class FeatureStoreWriter:
    """Appends whole documents to a new store, whose lengths nobody knows yet; `close` makes it one.

    For callers that have a document's features in their hands. It holds one shard's documents in
    memory, and what a killed writer left is removed by the next one, which begins anew.

    Args:
        path: folder to create; it must not hold a finished store.
        meta: target, tapped layers, dtype.
        max_shard_bytes: a shard is written before it would grow beyond this; one document that
            is longer makes a longer shard, since documents are never split over shards.

    Raises:
        ConfigError: the folder already holds a store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self.meta = meta
        self._max_shard_bytes = max_shard_bytes
        self._pending: list[_Document] = []
        self._pending_rows = 0
        self._num_documents = 0
        self._shards: list[ShardEntry] = []
        self._frozen: dict[str, Any] | None = None
        _make_folder(self.path)
        for pattern in ("shard-*.safetensors", f"*{PARTIAL_SUFFIX}"):
            for leftover in self.path.glob(pattern):
                leftover.unlink()
        _remove_sidecars(self.path)

    def add_document(
        self,
        token_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        features: torch.Tensor | None = None,
        final_hidden: torch.Tensor | None = None,
    ) -> None:
        """Append one document.

        Args:
            token_ids: ids of the target's vocabulary.
            loss_mask: True where a token is supervised (the response).
            features: tapped layer outputs, concatenated in the order of `target_layer_ids`; None
                exactly in token stores.
            final_hidden: what the target's head reads, exactly in stores whose `meta` says so.

        Shape:
            token_ids, loss_mask: ``[n]``, n >= 1. features: ``[n, C * d]``. final_hidden:
            ``[n, d]``.

        Raises:
            ConfigError: lengths or widths that do not fit, a token outside the vocabulary, or a
                full disk.
        """
        check_tokens(self._num_documents, token_ids, loss_mask, self.meta.target.vocab_size)
        length = int(token_ids.numel())
        rows = f"document {self._num_documents} with {length} tokens"
        check_states(rows, length, self.meta, features, final_hidden)
        shard_bytes = (self._pending_rows + length) * self.meta.row_bytes
        if self._pending and shard_bytes > self._max_shard_bytes:
            self._write_pending()
        self._pending.append((token_ids, loss_mask, features, final_hidden))
        self._pending_rows += length
        self._num_documents += 1

    def write_frozen(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Store the target's frozen embedding and head, once if they are the same tensor.

        Shape:
            embedding, head: ``[vocab_size, d]``, in the dtype that training shall use.
        """
        with full_disk_explained(self.path, _ANEW):
            self._frozen = write_frozen_file(self.path, self.meta.target, embedding, head)

    def close(self) -> None:
        """Write the last shard and then the index: from here on the folder is a store.

        Raises:
            ConfigError: no document was added, or a full disk.
        """
        _check_not_empty(self.path, self._num_documents)
        if self._pending:
            self._write_pending()
        with full_disk_explained(self.path, _ANEW):
            StoreIndex(self.meta, tuple(self._shards), self._frozen).write(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception the folder stays without an index: not a store.
        if kind is None:
            self.close()

    def _write_pending(self) -> None:
        path = self.path / _shard_name(len(self._shards))
        ids, masks, features, finals = zip(*self._pending, strict=True)
        first = self._num_documents - len(self._pending)
        with ShardWriter(
            path, self.meta, ids, masks, first_document=first, what_then=_ANEW
        ) as writer:
            for i, rows in enumerate(features):
                if rows is not None:
                    writer.write_rows(i, 0, rows, finals[i])
            self._shards.append(writer.close())
        self._pending, self._pending_rows = [], 0


def tidy_store(path: Path) -> None:
    """Remove what a finished store needs no more: sidecars, and partial files of killed writers.

    A kill may come between a store's index and this.

    Args:
        path: a store with an index.
    """
    _remove_sidecars(path)
    remove_dead_partials(path, finished=True)


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _check_not_empty(path: Path, num_documents: int) -> None:
    if num_documents == 0:
        raise ConfigError(f"no document for the feature store {path}: nothing to train on")


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if (path / INDEX_FILE).exists():
        raise ConfigError(
            f"{path} already holds a feature store; choose another folder or remove it"
        )


def _remove_sidecars(path: Path) -> None:
    for pattern in ("shard-*.safetensors", FROZEN_FILE):
        for file in path.glob(pattern + SIDECAR_SUFFIX):
            file.unlink(missing_ok=True)
