"""One shard of a feature store: a safetensors file that is written and read by row ranges.

The file is plain safetensors (any reader opens it), but a shard of long-context features is too
large to hold twice, so it is written document by document from the buffers that it already lies
in, and read with one positioned read per row range, straight into the tensor that is returned:
pages of other rows are never touched, and no mapping keeps them resident.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from megatron_splitkv.config import ConfigError

PARTIAL_SUFFIX = ".partial"
FEATURE_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
# Linux moves at most 0x7ffff000 bytes in one read; smaller steps also bound a write's buffer.
_MAX_IO_BYTES = 1 << 30


@dataclass(frozen=True)
class Document:
    """One tokenised document with the target's tapped hidden states.

    Shape:
        token_ids: ``[n]`` int32. loss_mask: ``[n]`` bool. features: ``[n, C * d]``. final_hidden:
        ``[n, d]``, in stores that hold it.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    final_hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class ShardEntry:
    """What the index says about one shard file."""

    file: str
    bytes: int
    sha256: str
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows (tokens) of all documents of the shard."""
        return sum(self.lengths)


@dataclass(frozen=True)
class ShardLayout:
    """Absolute byte offsets of the tensors of a shard (64-bit Python integers).

    `token_ids` comes first: its rows are 4 bytes, so features of either dtype stay aligned, and so
    do the final hidden states behind them.
    """

    rows: int
    feature_width: int
    dtype: str
    data_start: int
    final_width: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of features."""
        return self.feature_width * FEATURE_DTYPES[self.dtype].itemsize

    @property
    def final_row_bytes(self) -> int:
        """Bytes of one final hidden state; 0 in stores without them."""
        return self.final_width * FEATURE_DTYPES[self.dtype].itemsize

    @property
    def token_ids_start(self) -> int:
        """Byte offset of the int32 token ids."""
        return self.data_start

    @property
    def features_start(self) -> int:
        """Byte offset of the features."""
        return self.data_start + 4 * self.rows

    @property
    def final_hidden_start(self) -> int:
        """Byte offset of the final hidden states."""
        return self.features_start + self.row_bytes * self.rows

    @property
    def loss_mask_start(self) -> int:
        """Byte offset of the uint8 loss mask."""
        return self.final_hidden_start + self.final_row_bytes * self.rows

    @property
    def end(self) -> int:
        """Bytes of the whole file."""
        return self.loss_mask_start + self.rows

    @classmethod
    def of(cls, rows: int, feature_width: int, dtype: str, final_width: int = 0) -> Self:
        """The layout of a shard with that many rows; a pure function of its arguments."""
        header = _header(rows, feature_width, dtype, final_width)
        return cls(rows, feature_width, dtype, 8 + len(header), final_width)


def _header(rows: int, feature_width: int, dtype: str, final_width: int) -> bytes:
    layout = ShardLayout(rows, feature_width, dtype, 0, final_width)
    name = _SAFETENSORS_DTYPE[dtype]
    tensors = {
        "token_ids": {
            "dtype": "I32",
            "shape": [rows],
            "data_offsets": [layout.token_ids_start, layout.features_start],
        },
        "features": {
            "dtype": name,
            "shape": [rows, feature_width],
            "data_offsets": [layout.features_start, layout.final_hidden_start],
        },
        "final_hidden": {
            "dtype": name,
            "shape": [rows, final_width],
            "data_offsets": [layout.final_hidden_start, layout.loss_mask_start],
        },
        "loss_mask": {
            "dtype": "U8",
            "shape": [rows],
            "data_offsets": [layout.loss_mask_start, layout.end],
        },
    }
    if not final_width:
        del tensors["final_hidden"]
    text = json.dumps(tensors, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _pieces(documents: Sequence[Document], dtype: str) -> Iterator[memoryview]:
    for document in documents:
        yield _bytes_of(document.token_ids.to(torch.int32))
    for document in documents:
        yield _bytes_of(document.features.to(FEATURE_DTYPES[dtype]))
    for document in documents:
        if document.final_hidden is not None:
            yield _bytes_of(document.final_hidden.to(FEATURE_DTYPES[dtype]))
    for document in documents:
        yield _bytes_of(document.loss_mask.to(torch.uint8))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def write_shard(
    path: Path,
    documents: Sequence[Document],
    feature_width: int,
    dtype: str,
    final_width: int = 0,
) -> ShardEntry:
    """Write documents to `path` so that a half-written shard never carries its final name.

    Args:
        path: final file; the bytes go to ``<path>.partial`` first, are synced, then renamed.
        documents: whole documents (a document is never split over shards).
        feature_width: C * d.
        dtype: dtype of the features on disk, a key of `FEATURE_DTYPES`.
        final_width: d where the documents carry final hidden states, 0 where none does.

    Returns:
        The index entry, its checksum computed from the bytes on their way to the disk.
    """
    lengths = tuple(int(document.token_ids.numel()) for document in documents)
    header = _header(sum(lengths), feature_width, dtype, final_width)
    digest = hashlib.sha256()
    written = 0
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with open(partial, "wb") as file:
        for piece in (
            memoryview(len(header).to_bytes(8, "little") + header),
            *_pieces(documents, dtype),
        ):
            digest.update(piece)
            file.write(piece)
            written += len(piece)
        publish(file, path)
    return ShardEntry(path.name, written, digest.hexdigest(), lengths)


def publish(file: BinaryIO, path: Path) -> None:
    """Sync an open partial file, rename it to `path` and sync the folder's entry."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_into(handle: int, path: Path, offset: int, out: np.ndarray) -> None:
    """Fill a uint8 array from `offset` of an open file.

    Raises:
        ConfigError: the file ends before the array is full.
    """
    done = 0
    while done < out.nbytes:
        count = os.preadv(handle, [out[done : done + _MAX_IO_BYTES]], offset + done)
        if count == 0:
            raise ConfigError(
                f"{path} ends at byte {offset + done}, expected {offset + out.nbytes}: the shard "
                "is truncated; run `splitkv prepare` again"
            )
        done += count


def seal_index(index: dict[str, Any]) -> dict[str, Any]:
    """The index with a SHA-256 of all its other entries under ``sha256``.

    Lengths and offsets are as easily damaged as features, and cut documents wrongly without a word.
    """
    content = {name: value for name, value in index.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
