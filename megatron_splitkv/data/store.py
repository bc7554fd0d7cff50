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
from bisect import bisect_right
from collections import OrderedDict
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
        self.meta = index.meta
        self._layouts, self._frozen = index.layouts(), index.frozen
        self._paths = [self.path / shard.file for shard in index.shards]
        for file in index.files(self.path):
            if problem := file.problem(full=verify == "full"):
                raise ConfigError(problem)

        self.lengths = np.array([n for s in index.shards for n in s.lengths], dtype=np.int64)
        counts = [len(shard.lengths) for shard in index.shards]
        # Documents before each shard, and each document's first row inside its shard.
        self._first_document = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
        global_starts = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
        shard_starts = np.cumsum([0, *(s.rows for s in index.shards)])[:-1]
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
        places = [(layout.features_start, layout.row_bytes) for layout in self._layouts]
        return self._gather(documents, starts, stops, self.meta.feature_width, places)

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
        places = [(layout.final_hidden_start, layout.final_row_bytes) for layout in self._layouts]
        return self._gather(documents, starts, stops, self.meta.final_width, places)

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
        return {**self.__dict__, "_handles": OrderedDict(), "bytes_read": 0}

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def _gather(
        self,
        documents: ArrayLike,
        starts: ArrayLike,
        stops: ArrayLike,
        width: int,
        places: list[tuple[int, int]],
    ) -> torch.Tensor:
        """Row ranges of a tensor that lies, in each shard, at a byte and has rows of some bytes."""
        which, first, last = (np.asarray(v, dtype=np.int64) for v in (documents, starts, stops))
        lengths = self.lengths[np.clip(which, 0, self.num_documents - 1)]
        bad = (which < 0) | (which >= self.num_documents)
        bad |= (first < 0) | (first > last) | (last > lengths)
        if bad.any():
            i = int(bad.argmax())
            raise IndexError(
                f"rows {first[i]}..{last[i]} of document {which[i]} with {lengths[i]} rows, in a "
                f"store with {self.num_documents} documents"
            )
        shards = np.searchsorted(self._first_document, which, side="right") - 1
        begins, row_bytes = np.array(places, dtype=np.int64)[shards].T
        offsets = begins + row_bytes * (self._row_start[which] + first)
        ends = np.cumsum(row_bytes * (last - first))
        # numpy asks for huge pages, torch does not: a new gigabyte costs 512 page faults, not
        # 262,144.
        rows = np.empty((int((last - first).sum()), width), f"i{self.feature_dtype.itemsize}")
        content, done = rows.reshape(-1).view(np.uint8), 0
        for shard, offset, end in zip(
            shards.tolist(), offsets.tolist(), ends.tolist(), strict=True
        ):
            if done < end:
                self._read(shard, offset, content[done:end])
            done = end
        self.bytes_read += done
        return torch.from_numpy(rows).view(self.feature_dtype)

    def _locate(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of a store with {self.num_documents}")
        shard = bisect_right(self._first_document, document) - 1
        return shard, int(self._row_start[document])

    def _read(self, shard: int, offset: int, out: np.ndarray) -> None:
        path = self._paths[shard]
        handle = self._handles.pop(shard, None)
        if handle is None:
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be opened any more ({error.strerror}): leave a store where it "
                    "is while it is read"
                ) from error
        self._handles[shard] = handle
        if len(self._handles) > _MAX_OPEN_SHARDS:
            os.close(self._handles.popitem(last=False)[1])
        read_into(handle, path, offset, out)
