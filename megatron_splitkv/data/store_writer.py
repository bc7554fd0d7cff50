"""Writing a feature store so that a crash at any moment leaves no half of one."""

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import safetensors.torch
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.shard import (
    PARTIAL_SUFFIX,
    Document,
    ShardEntry,
    publish,
    seal_index,
    write_shard,
)
from megatron_splitkv.data.store import EMBEDDING_KEY, FROZEN_FILE, HEAD_KEY, INDEX_FILE


class FeatureStoreWriter:
    """Appends documents to a new store; `close` makes it one.

    Every file is written aside, synced and renamed, and the index comes last: until `close`
    returns, a reader finds no store. What a killed writer left is removed by the next one.

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
        max_shard_bytes: int = 1 << 29,
    ) -> None:
        self.path = Path(path)
        self.meta = meta
        self._max_shard_bytes = max_shard_bytes
        self._pending: list[Document] = []
        self._pending_bytes = 0
        self._shards: list[ShardEntry] = []
        self._frozen: dict[str, str | int] | None = None
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / INDEX_FILE).exists():
            raise ConfigError(
                f"{self.path} already holds a feature store; choose another folder or remove it"
            )
        for pattern in ("shard-*.safetensors", f"*{PARTIAL_SUFFIX}"):
            for leftover in self.path.glob(pattern):
                leftover.unlink()

    def add_document(
        self,
        token_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        features: torch.Tensor,
        final_hidden: torch.Tensor | None = None,
    ) -> None:
        """Append one document.

        Args:
            token_ids: ids of the target's vocabulary.
            loss_mask: True where a token is supervised (the response).
            features: tapped layer outputs, concatenated in the order of `target_layer_ids`.
            final_hidden: what the target's head reads, exactly in stores whose `meta` says so.

        Shape:
            token_ids, loss_mask: ``[n]``, n >= 1. features: ``[n, C * d]``. final_hidden:
            ``[n, d]``.

        Raises:
            ConfigError: lengths or widths that do not fit, or a token outside the vocabulary.
        """
        length, width = int(token_ids.numel()), self.meta.feature_width
        if length == 0:
            raise ConfigError(f"document {self._num_documents} is empty")
        if tuple(loss_mask.shape) != (length,) or tuple(features.shape) != (length, width):
            raise ConfigError(
                f"document {self._num_documents} with {length} tokens needs loss_mask [{length}] "
                f"and features [{length}, {width}], got {list(loss_mask.shape)} and "
                f"{list(features.shape)}"
            )
        found = None if final_hidden is None else list(final_hidden.shape)
        expected = [length, self.meta.final_width] if self.meta.final_hidden else None
        if found != expected:
            raise ConfigError(
                f"document {self._num_documents} with {length} tokens needs final hidden states "
                f"of shape {expected}, got {found}"
            )
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.meta.target.vocab_size:
            raise ConfigError(
                f"document {self._num_documents} has token {low if low < 0 else high}, outside "
                f"the vocabulary of {self.meta.target.vocab_size}"
            )
        document = Document(token_ids, loss_mask, features, final_hidden)
        number_bytes = 4 if self.meta.dtype == "float32" else 2
        row_bytes = (width + self.meta.final_width) * number_bytes + 5
        if self._pending and self._pending_bytes + length * row_bytes > self._max_shard_bytes:
            self._write_pending()
        self._pending.append(document)
        self._pending_bytes += length * row_bytes

    def write_frozen(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Store the target's frozen embedding and head, once if they are the same tensor.

        Shape:
            embedding, head: ``[vocab_size, d]``, in the dtype that training shall use.
        """
        tensors = {EMBEDDING_KEY: embedding.detach().contiguous()}
        if head.data_ptr() != embedding.data_ptr():
            tensors[HEAD_KEY] = head.detach().contiguous()
        shape = (self.meta.target.vocab_size, self.meta.target.hidden_size)
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        content = safetensors.torch.save(tensors)
        path = self.path / FROZEN_FILE
        with open(path.with_name(path.name + PARTIAL_SUFFIX), "wb") as file:
            file.write(content)
            publish(file, path)
        self._frozen = {
            "file": FROZEN_FILE,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def close(self) -> None:
        """Write the last shard and then the index: from here on the folder is a store.

        Raises:
            ConfigError: no document was added.
        """
        if self._pending:
            self._write_pending()
        if not self._shards:
            raise ConfigError(f"no document for the feature store {self.path}: nothing to train on")
        index = {
            "schema_version": self.meta.schema_version,
            **self.meta.to_json(),
            "frozen": self._frozen,
            "shards": [
                {
                    "file": shard.file,
                    "bytes": shard.bytes,
                    "sha256": shard.sha256,
                    "rows": shard.rows,
                    "lengths": shard.lengths,
                }
                for shard in self._shards
            ],
        }
        path = self.path / INDEX_FILE
        with open(path.with_name(path.name + PARTIAL_SUFFIX), "wb") as file:
            file.write(json.dumps(seal_index(index), indent=1).encode())
            publish(file, path)

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

    @property
    def _num_documents(self) -> int:
        return sum(len(shard.lengths) for shard in self._shards) + len(self._pending)

    def _write_pending(self) -> None:
        path = self.path / f"shard-{len(self._shards):05d}.safetensors"
        self._shards.append(
            write_shard(
                path,
                self._pending,
                self.meta.feature_width,
                self.meta.dtype,
                self.meta.final_width,
            )
        )
        self._pending, self._pending_bytes = [], 0
