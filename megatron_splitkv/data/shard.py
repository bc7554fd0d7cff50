"""One shard of a feature store: a safetensors file that is written and read by row ranges.

The file is plain safetensors (any reader opens it), but a shard of long-context features is too
large to hold twice, so rows are written where they belong as they come (`ShardWriter`), and read
with one positioned read per row range, straight into the tensor that is returned: pages of other
rows are never touched, and no mapping keeps them resident.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from megatron_splitkv.config import ConfigError

PARTIAL_SUFFIX = ".partial"
FEATURE_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
# A write's buffer is as large as its step.
_MAX_IO_BYTES = 1 << 30


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

    def to_json(self) -> dict[str, Any]:
        """The shard's part of index.json."""
        return {
            "file": self.file,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "rows": self.rows,
            "lengths": self.lengths,
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(entry["file"], entry["bytes"], entry["sha256"], tuple(entry["lengths"]))


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
        head = shard_head(rows, feature_width, dtype, final_width)
        return cls(rows, feature_width, dtype, len(head), final_width)


def shard_head(rows: int, feature_width: int, dtype: str, final_width: int) -> bytes:
    """What a shard's file begins with: the header's length in 8 bytes, and the header.

    Args:
        rows: of all documents.
        feature_width: C * d; 0 in a token store, whose shards have no features.
        dtype: of features and final hidden states, a key of `FEATURE_DTYPES`.
        final_width: d where the shard holds final hidden states, else 0.
    """
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
    for kind, width in (("features", feature_width), ("final_hidden", final_width)):
        if not width:
            del tensors[kind]
    text = json.dumps(tensors, separators=(",", ":")).encode()
    header = text + b" " * (-len(text) % 8)
    return len(header).to_bytes(8, "little") + header


def publish(file: BinaryIO, path: Path) -> None:
    """Sync an open partial file, rename it to `path` and sync the folder's entry."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_into(handle: int, path: Path, offset: int, out: memoryview) -> None:
    """Fill a buffer of bytes from `offset` of an open file.

    Raises:
        ConfigError: the file ends before the buffer is full.
    """
    while out:
        # Linux reads no more than 0x7ffff000 bytes at once.
        count = os.preadv(handle, [out], offset)
        if count == 0:
            raise ConfigError(
                f"{path} ends at byte {offset}, expected {offset + len(out)}: the shard is "
                "truncated; prepare it again with --overwrite"
            )
        out, offset = out[count:], offset + count


def write_at(handle: int, offset: int, content: memoryview) -> None:
    """Write bytes from `offset` of an open file on; other bytes stay."""
    done = 0
    while done < len(content):
        done += os.pwrite(handle, content[done : done + _MAX_IO_BYTES], offset + done)


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
