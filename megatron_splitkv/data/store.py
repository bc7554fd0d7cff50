"""Feature store: tokenised documents and the target's tapped hidden states, on disk.

A store is a folder. `index.json` is written last, so a folder without one is no store, whatever a
killed writer left in it. `FeatureStore` checks every file's size when it opens, and reads only the
rows that it is asked for.

Rows are read with positioned reads into the tensor that is returned, not through a mapping. As
`splitkv bench store` measures on the same row ranges, both are equally fast where the files are
cached; from the disk a mapping, which faults page by page, is several times slower, and the pages
that it has touched count as the process's memory beside the copy that training needs anyway.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import ArrayLike

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.frozen import EMBEDDING_KEY, HEAD_KEY
from megatron_splitkv.data.shard import FEATURE_DTYPES, read_into
from megatron_splitkv.data.store_index import StoreIndex, frozen_file

_MAX_OPEN_SHARDS = 64


class FeatureStore:
    """Read access to a store that a `StoreBuilder` or `FeatureStoreWriter` has finished.

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
        index = StoreIndex.read(self.path)
        self.meta, self._frozen = index.meta, index.frozen
        self._paths = [self.path / shard.file for shard in index.shards]
        for file in index.files(self.path):
            if problem := file.problem(full=verify == "full"):
                raise ConfigError(problem)

        self.lengths = np.array([n for s in index.shards for n in s.lengths], dtype=np.int64)
        counts = [len(shard.lengths) for shard in index.shards]
        # Each document's shard, and its first row inside it.
        self._shard = np.repeat(np.arange(len(counts)), counts)
        global_starts = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
        shard_starts = np.cumsum([0, *(s.rows for s in index.shards)])[:-1]
        self._row_start = global_starts - np.repeat(shard_starts, counts)
        layouts = index.layouts()
        # Byte of each shard's file at which a tensor begins.
        self._token_ids_at = np.array([x.token_ids_start for x in layouts], dtype=np.int64)
        self._features_at = np.array([x.features_start for x in layouts], dtype=np.int64)
        self._final_hidden_at = np.array([x.final_hidden_start for x in layouts], dtype=np.int64)
        self._loss_mask_at = np.array([x.loss_mask_start for x in layouts], dtype=np.int64)
        self._handles: dict[int, int] = {}
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
        return self.gather_token_ids([document])

    def loss_mask(self, document: int) -> np.ndarray:
        """Supervised positions of one document, bool ``[n]``."""
        return self.gather_loss_masks([document])

    def gather_token_ids(self, documents: ArrayLike) -> np.ndarray:
        """`token_ids` of several documents, end to end; one positioned read each."""
        return self._gather_whole(documents, self._token_ids_at, np.int32).astype(np.int64)

    def gather_loss_masks(self, documents: ArrayLike) -> np.ndarray:
        """`loss_mask` of several documents, end to end; one positioned read each."""
        return self._gather_whole(documents, self._loss_mask_at, np.uint8).astype(bool)

    def read_features(self, document: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start..stop`` of one document's features; no other row is touched.

        Returns:
            ``[stop - start, C * d]`` in the store's dtype.

        Raises:
            ConfigError: a token store.
            IndexError: rows that the document does not have.
        """
        return self.gather_features([document], [start], [stop])

    def gather_features(
        self, documents: ArrayLike, starts: ArrayLike, stops: ArrayLike
    ) -> torch.Tensor:
        """`read_features` of several row ranges, end to end; one positioned read each.

        Shape:
            documents, starts, stops int64 ``[k]`` -> ``[rows, C * d]``, rows the sum of
            ``stops - starts``.
        """
        self.require_features()
        width = self.meta.feature_width
        return self._gather_rows(documents, starts, stops, self._features_at, width)

    def read_final_hidden(self, document: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start..stop`` of one document's final hidden states; no other row is touched.

        Returns:
            ``[stop - start, d]`` in the store's dtype: what the target's head reads.

        Raises:
            ConfigError: the store was written without them.
            IndexError: rows that the document does not have.
        """
        return self.gather_final_hidden([document], [start], [stop])

    def gather_final_hidden(
        self, documents: ArrayLike, starts: ArrayLike, stops: ArrayLike
    ) -> torch.Tensor:
        """`read_final_hidden` of several row ranges, end to end; one positioned read each."""
        self.require_final_hidden()
        width = self.meta.final_width
        return self._gather_rows(documents, starts, stops, self._final_hidden_at, width)

    def require_features(self) -> None:
        """Refuse a token store.

        Raises:
            ConfigError: naming the store and the ways out.
        """
        if not self.meta.has_features:
            raise ConfigError(
                f"{self.path} is a token store, it holds no features: prepare it without "
                "`--tokens-only`, or train with `--online-target`"
            )

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
        if problem := frozen_file(self.path, self._frozen_entry()).problem(full=True):
            raise ConfigError(problem)

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
        return {**self.__dict__, "_handles": {}, "bytes_read": 0}

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def _gather_whole(
        self, documents: ArrayLike, begins: np.ndarray, dtype: type[np.generic]
    ) -> np.ndarray:
        """A tensor of one number a row, of whole documents."""
        which = np.asarray(documents, dtype=np.int64)
        stops = self.lengths.take(which, mode="clip")
        row_bytes = np.dtype(dtype).itemsize
        return self._gather(which, np.zeros_like(which), stops, begins, row_bytes).view(dtype)

    def _gather_rows(
        self,
        documents: ArrayLike,
        starts: ArrayLike,
        stops: ArrayLike,
        begins: np.ndarray,
        width: int,
    ) -> torch.Tensor:
        """A tensor of rows of `feature_dtype`, which `bytes_read` counts."""
        row_bytes = width * self.feature_dtype.itemsize
        content = self._gather(documents, starts, stops, begins, row_bytes)
        self.bytes_read += content.nbytes
        rows = content.view(f"i{self.feature_dtype.itemsize}").reshape(-1, width)
        return torch.from_numpy(rows).view(self.feature_dtype)

    def _gather(
        self,
        documents: ArrayLike,
        starts: ArrayLike,
        stops: ArrayLike,
        begins: np.ndarray,
        row_bytes: int,
    ) -> np.ndarray:
        """The bytes of row ranges of a tensor, end to end, uint8.

        Args:
            documents: int64 ``[k]``.
            starts: int64 ``[k]``, rows.
            stops: int64 ``[k]``, rows.
            begins: byte at which the tensor begins in each shard.
            row_bytes: of the tensor.
        """
        which, first, last = (np.asarray(v, dtype=np.int64) for v in (documents, starts, stops))
        lengths = self.lengths.take(which, mode="clip")
        bad = (which < 0) | (which >= self.num_documents)
        bad |= (first < 0) | (first > last) | (last > lengths)
        if bad.any():
            i = int(bad.argmax())
            raise IndexError(
                f"rows {first[i]}..{last[i]} of document {which[i]} with {lengths[i]} rows, in a "
                f"store with {self.num_documents} documents"
            )
        shards = self._shard[which]
        offsets = begins[shards] + row_bytes * (self._row_start[which] + first)
        sizes = row_bytes * (last - first)
        # numpy asks for huge pages, torch does not: a new gigabyte costs 512 page faults, not
        # 262,144.
        content = np.empty(int(sizes.sum()), dtype=np.uint8)
        rest = memoryview(content)
        for shard, offset, size in zip(
            shards.tolist(), offsets.tolist(), sizes.tolist(), strict=True
        ):
            if shard not in self._handles:
                self._open(shard)
            read_into(self._handles[shard], self._paths[shard], offset, rest[:size])
            rest = rest[size:]
        return content

    def _open(self, shard: int) -> None:
        """Open a shard; the one that has been open for longest makes room."""
        path = self._paths[shard]
        try:
            self._handles[shard] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be opened any more ({error.strerror}): leave a store where it is "
                "while it is read"
            ) from error
        if len(self._handles) > _MAX_OPEN_SHARDS:
            os.close(self._handles.pop(next(iter(self._handles))))
