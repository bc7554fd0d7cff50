"""Feature store: tokenised documents and the target's tapped hidden states, on disk.

A store is a folder. `index.json` is written last, so a folder without one is no store, whatever a
killed writer left in it. `FeatureStore` checks every file's size when it opens, and reads only the
rows that it is asked for.
"""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.meta import SCHEMA_VERSION, StoreMeta
from megatron_splitkv.data.shard import (
    FEATURE_DTYPES,
    ShardEntry,
    ShardLayout,
    file_sha256,
    read_into,
    seal_index,
)

INDEX_FILE = "index.json"
FROZEN_FILE = "target_frozen.safetensors"
EMBEDDING_KEY = "embed_tokens.weight"
HEAD_KEY = "lm_head.weight"
_MAX_OPEN_SHARDS = 64


class FeatureStore:
    """Read access to a store that a `FeatureStoreWriter` has finished.

    Args:
        path: the store's folder.
        verify: ``size`` compares every file's size with the index (always done), ``full`` its
            SHA-256 too.

    Attributes:
        meta: target, tapped layers, dtype.
        lengths: int64 ``[num_documents]``, tokens of each document.
        bytes_read: bytes of features and final hidden states read so far by this object (token
            ids and masks, 5 bytes a row, are not counted).

    Raises:
        ConfigError: no store, another schema version, a missing, truncated or corrupted file.
    """

    def __init__(self, path: str | os.PathLike[str], verify: str = "size") -> None:
        require_choice("verify", verify, ("size", "full"))
        self.path = Path(path)
        index = _read_index(self.path)
        try:
            self.meta = StoreMeta.from_json(index)
            self._shards = [
                ShardEntry(s["file"], s["bytes"], s["sha256"], tuple(s["lengths"]))
                for s in index["shards"]
            ]
            frozen = index["frozen"]
            self._frozen: dict[str, Any] | None = (
                None
                if frozen is None
                else {key: frozen[key] for key in ("file", "bytes", "sha256")}
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.path / INDEX_FILE} is incomplete: {error!r}") from error
        if not self._shards:
            raise ConfigError(
                f"{self.path / INDEX_FILE} lists no shard; run `splitkv prepare` again"
            )
        self._layouts = [
            ShardLayout.of(
                shard.rows, self.meta.feature_width, self.meta.dtype, self.meta.final_width
            )
            for shard in self._shards
        ]
        for shard, layout in zip(self._shards, self._layouts, strict=True):
            self._check_file(shard.file, shard.bytes, shard.sha256, verify)
            if layout.end != shard.bytes:
                raise ConfigError(
                    f"{self.path / shard.file}: {shard.rows} rows of "
                    f"{layout.row_bytes + layout.final_row_bytes} bytes make {layout.end} bytes, "
                    f"the index says {shard.bytes}"
                )
        if self._frozen is not None:
            self._check_file(
                self._frozen["file"], self._frozen["bytes"], self._frozen["sha256"], verify
            )

        self.lengths = np.array([n for s in self._shards for n in s.lengths], dtype=np.int64)
        counts = [len(shard.lengths) for shard in self._shards]
        # Documents before each shard, and each document's first row inside its shard.
        self._first_document = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
        global_starts = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
        shard_starts = np.cumsum([0, *(s.rows for s in self._shards)])[:-1]
        self._row_start = global_starts - np.repeat(shard_starts, counts)
        self._handles: OrderedDict[int, int] = OrderedDict()
        self.bytes_read = 0

    def __len__(self) -> int:
        return self.num_documents

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return len(self.lengths)

    @property
    def feature_dtype(self) -> torch.dtype:
        """dtype of the rows that `read_features` returns."""
        return FEATURE_DTYPES[self.meta.dtype]

    def token_ids(self, document: int) -> np.ndarray:
        """Token ids of one document, int64 ``[n]``."""
        shard, row = self._locate(document)
        out = np.empty(int(self.lengths[document]), dtype=np.int32)
        self._read(shard, self._layouts[shard].token_ids_start + 4 * row, out.view(np.uint8))
        return out.astype(np.int64)

    def loss_mask(self, document: int) -> np.ndarray:
        """Supervised positions of one document, bool ``[n]``."""
        shard, row = self._locate(document)
        out = np.empty(int(self.lengths[document]), dtype=np.uint8)
        self._read(shard, self._layouts[shard].loss_mask_start + row, out)
        return out.astype(bool)

    def read_features(self, document: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start..stop`` of one document's features; no other row is touched.

        Returns:
            ``[stop - start, C * d]`` in the store's dtype.
        """
        out = torch.empty(stop - start, self.meta.feature_width, dtype=self.feature_dtype)
        self.read_features_into(document, start, stop, out)
        return out

    def read_features_into(self, document: int, start: int, stop: int, out: torch.Tensor) -> None:
        """`read_features` into rows of a tensor that exists (contiguous, the store's dtype).

        Raises:
            IndexError: rows that the document does not have.
        """
        self._check_rows(document, start, stop)
        if start == stop:
            return
        shard, row = self._locate(document)
        layout = self._layouts[shard]
        self._read_rows(shard, layout.features_start + layout.row_bytes * (row + start), out)

    def read_final_hidden(self, document: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start..stop`` of one document's final hidden states; no other row is touched.

        Returns:
            ``[stop - start, d]`` in the store's dtype: what the target's head reads.

        Raises:
            ConfigError: the store was written without them.
            IndexError: rows that the document does not have.
        """
        out = torch.empty(stop - start, self.meta.target.hidden_size, dtype=self.feature_dtype)
        self.read_final_hidden_into(document, start, stop, out)
        return out

    def read_final_hidden_into(
        self, document: int, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """`read_final_hidden` into rows of a tensor that exists (contiguous, the store's dtype)."""
        self.require_final_hidden()
        self._check_rows(document, start, stop)
        if start == stop:
            return
        shard, row = self._locate(document)
        layout = self._layouts[shard]
        offset = layout.final_hidden_start + layout.final_row_bytes * (row + start)
        self._read_rows(shard, offset, out)

    def require_final_hidden(self) -> None:
        """Refuse a store without the target's final hidden states.

        Raises:
            ConfigError: naming the store and the option that writes them.
        """
        if not self.meta.final_hidden:
            raise ConfigError(
                f"{self.path} holds no final hidden states of its target, which this training "
                "needs; prepare it again with `splitkv prepare --final-hidden`"
            )

    def frozen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's frozen embedding and output head.

        Returns:
            ``(embed_tokens.weight, lm_head.weight)``, each ``[vocab_size, d]``; the same tensor
            twice where the target ties them.

        Raises:
            ConfigError: the store was written without them.
        """
        tensors = safetensors.torch.load_file(self.path / self._frozen_entry()["file"])
        embedding = tensors[EMBEDDING_KEY]
        return embedding, tensors.get(HEAD_KEY, embedding)

    def check_frozen(self) -> None:
        """Compare the content of the frozen embedding and head with the index.

        Raises:
            ConfigError: they are corrupted, or the store was written without them.
        """
        entry = self._frozen_entry()
        self._check_file(entry["file"], entry["bytes"], entry["sha256"], "full")

    def _frozen_entry(self) -> dict[str, Any]:
        if self._frozen is None:
            raise ConfigError(
                f"{self.path} holds no target embedding and head; a training store from "
                "`splitkv prepare` does"
            )
        return self._frozen

    def close(self) -> None:
        """Close the shard files that are open."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        # Loader workers reopen their own files.
        return {**self.__dict__, "_handles": OrderedDict(), "bytes_read": 0}

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def _check_rows(self, document: int, start: int, stop: int) -> None:
        length = int(self.lengths[document])
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start}..{stop} of document {document} with {length} rows")

    def _read_rows(self, shard: int, offset: int, out: torch.Tensor) -> None:
        """Fill rows of features or final hidden states, and count their bytes."""
        content = out.view(-1).view(torch.uint8).numpy()
        self._read(shard, offset, content)
        self.bytes_read += content.nbytes

    def _locate(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of a store with {self.num_documents}")
        shard = bisect_right(self._first_document, document) - 1
        return shard, int(self._row_start[document])

    def _read(self, shard: int, offset: int, out: np.ndarray) -> None:
        path = self.path / self._shards[shard].file
        handle = self._handles.pop(shard, None)
        if handle is None:
            handle = os.open(path, os.O_RDONLY)
        self._handles[shard] = handle
        if len(self._handles) > _MAX_OPEN_SHARDS:
            os.close(self._handles.popitem(last=False)[1])
        read_into(handle, path, offset, out)

    def _check_file(self, name: str, size: int, sha256: str, verify: str) -> None:
        path = self.path / name
        if not path.is_file():
            raise ConfigError(f"{path} is missing although the index lists it")
        found = path.stat().st_size
        if found != size:
            raise ConfigError(
                f"{path} has {found} bytes, expected {size} (checksum sha256 {sha256}): it is "
                "truncated or was overwritten; run `splitkv prepare` again"
            )
        if verify == "full" and (digest := file_sha256(path)) != sha256:
            raise ConfigError(
                f"{path} is corrupted: checksum sha256 {digest}, expected {sha256}; "
                "run `splitkv prepare` again"
            )


def _read_index(path: Path) -> dict[str, Any]:
    file = path / INDEX_FILE
    if not file.is_file():
        reason = "it has no index.json" if path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"{path} is not a feature store: {reason}; make one with `splitkv prepare`"
        )
    try:
        index = json.loads(file.read_text())
        version = index["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a feature store index: {error!r}") from error
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ConfigError(
            f"{file} has schema version {version}, this version reads 1 to {SCHEMA_VERSION}; "
            "prepare the store again, or use the version that wrote it"
        )
    if (expected := seal_index(index)["sha256"]) != index.get("sha256"):
        raise ConfigError(
            f"{file} is corrupted: its checksum is sha256 {index.get('sha256')}, its content's "
            f"{expected}; run `splitkv prepare` again"
        )
    return index
