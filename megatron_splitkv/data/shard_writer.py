"""One shard, written row range by row range in any order."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.partial import full_disk_explained, open_partial, written_aside
from megatron_splitkv.data.shard import (
    FEATURE_DTYPES,
    ShardEntry,
    ShardLayout,
    file_sha256,
    publish,
    seal_index,
    shard_head,
    write_at,
)

SIDECAR_SUFFIX = ".json"
_AGAIN = "give the same command again"


class ShardWriter:
    """Writes a shard whose documents are known before their features are.

    Features arrive as pieces, in any order, and go to their place in a file of the writer's own;
    `close` publishes it. A process holds one piece at a time, never a shard. After an exception
    the file is gone, and nothing carries the shard's name.

    Args:
        path: the shard's final name.
        meta: of the store.
        token_ids: ids of each document of the shard.
        loss_masks: True where a token is supervised.
        first_document: number of the shard's first document in the store, for messages.
        plan: what a sidecar beside the shard shall name as the store's plan, see `StoreBuilder`;
            None writes no sidecar.
        bytes_to_come: bytes that the store still needs, this shard included, for the message of a
            full disk; None: this shard's.
        what_then: what that message tells to do once there is room.

    Shape:
        token_ids, loss_masks: ``[n]`` each, n >= 1.

    Raises:
        ConfigError: lengths that do not fit, a token outside the vocabulary, a full disk.
    """

    def __init__(
        self,
        path: Path,
        meta: StoreMeta,
        token_ids: Sequence[torch.Tensor],
        loss_masks: Sequence[torch.Tensor],
        *,
        first_document: int = 0,
        plan: str | None = None,
        bytes_to_come: Callable[[], int] | None = None,
        what_then: str = _AGAIN,
    ) -> None:
        if len(token_ids) != len(loss_masks):
            raise ConfigError(
                f"{path.name} needs a loss mask for each of its {len(token_ids)} documents, got "
                f"{len(loss_masks)}"
            )
        for i, (ids, mask) in enumerate(zip(token_ids, loss_masks, strict=True)):
            check_tokens(first_document + i, ids, mask, meta.target.vocab_size)
        self.path = path
        self.meta = meta
        self.lengths = tuple(int(ids.numel()) for ids in token_ids)
        self._first_document = first_document
        self._plan = plan
        self._starts = np.cumsum([0, *self.lengths]).tolist()
        shape = (self._starts[-1], meta.feature_width, meta.dtype, meta.final_width)
        self._layout = ShardLayout.of(*shape)
        self._bytes_to_come = bytes_to_come or (lambda: self._layout.end)
        self._what_then = what_then
        # One byte a row, of rows that have hundreds; token stores have no pieces to wait for.
        self._there = np.full(self._layout.rows, not meta.has_features)
        with full_disk_explained(path.parent, what_then, self._bytes_to_come):
            self._file = open_partial(path)
        with self._removed_on_error():
            os.ftruncate(self._file.fileno(), self._layout.end)
            write_at(self._file.fileno(), 0, memoryview(shard_head(*shape)))
            for row, ids, mask in zip(self._starts, token_ids, loss_masks, strict=False):
                self._write("token_ids", row, ids.to("cpu", torch.int32))
                self._write("loss_mask", row, mask.to("cpu", torch.uint8))

    def write_rows(
        self,
        document_in_shard: int,
        start: int,
        features: torch.Tensor,
        final_hidden: torch.Tensor | None = None,
    ) -> None:
        """Put a piece of a document in its place.

        Args:
            document_in_shard: 0 for the shard's first document.
            start: the piece's first position in the document.
            features: tapped layer outputs, concatenated in the order of `target_layer_ids`.
            final_hidden: what the target's head reads, exactly in stores whose `meta` says so.

        Shape:
            features: ``[n, C * d]``. final_hidden: ``[n, d]``. Any float dtype, any device.

        Raises:
            ConfigError: a token store, widths or rows that do not fit, a full disk.
        """
        document, length = self._first_document + document_in_shard, self.lengths[document_in_shard]
        stop = start + len(features)
        what = f"document {document} with {length} tokens, rows {start} to {stop},"
        if not 0 <= start <= stop <= length:
            raise ConfigError(f"{what} has no such rows")
        check_states(what, stop - start, self.meta, features, final_hidden)
        row, dtype = self._starts[document_in_shard] + start, FEATURE_DTYPES[self.meta.dtype]
        with self._removed_on_error():
            self._write("features", row, features.to("cpu", dtype))
            if final_hidden is not None:
                self._write("final_hidden", row, final_hidden.to("cpu", dtype))
        self._there[row : row + stop - start] = True

    def close(self) -> ShardEntry:
        """Publish the shard, then its sidecar.

        Returns:
            The index entry; its checksum is of the file as it is read back.

        Raises:
            ConfigError: rows that never came, a full disk.
        """
        if not self._there.all():
            self.discard()
            row = int(self._there.argmin())
            document = int(np.searchsorted(self._starts, row, side="right")) - 1
            raise ConfigError(
                f"{self.path.name}: row {row - self._starts[document]} of document "
                f"{self._first_document + document} was never written"
            )
        with self._removed_on_error():
            digest = file_sha256(Path(self._file.name))
            entry = ShardEntry(self.path.name, self._layout.end, digest, self.lengths)
            with (
                nullcontext()
                if self._plan is None
                else sidecar(self.path, self._plan, entry.to_json())
            ):
                publish(self._file, self.path)
            self._file.close()
        return entry

    def discard(self) -> None:
        """Remove what was written; nothing happens after `close`."""
        if not self._file.closed:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._file.closed:
            self.close()

    def _write(self, kind: str, row: int, rows: torch.Tensor) -> None:
        layout = self._layout
        start, row_bytes = {
            "token_ids": (layout.token_ids_start, 4),
            "features": (layout.features_start, layout.row_bytes),
            "final_hidden": (layout.final_hidden_start, layout.final_row_bytes),
            "loss_mask": (layout.loss_mask_start, 1),
        }[kind]
        content = memoryview(rows.contiguous().view(-1).view(torch.uint8).numpy())
        write_at(self._file.fileno(), start + row * row_bytes, content)

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        with full_disk_explained(self.path.parent, self._what_then, self._bytes_to_come):
            try:
                yield
            except BaseException:
                self.discard()
                raise


def sidecar(path: Path, plan: str, entry: dict[str, Any]) -> AbstractContextManager[None]:
    """Say beside a file what it holds, once the block has published it.

    Args:
        path: of the file.
        plan: the store's plan, that the file belongs to.
        entry: what the index shall say about it.
    """
    content = json.dumps(seal_index({"plan": plan, "entry": entry})).encode()
    return written_aside(path.with_name(path.name + SIDECAR_SUFFIX), content)


def read_sidecar(path: Path, plan: str) -> dict[str, Any] | None:
    """The index entry of a file that is published whole.

    Args:
        path: of the file.
        plan: what the sidecar must name.

    Returns:
        None where the sidecar is missing, damaged or of another plan, or the file has another
        size than it says: then the file is to be written again.
    """
    try:
        content = json.loads(path.with_name(path.name + SIDECAR_SUFFIX).read_bytes())
        entry: dict[str, Any] = content["entry"]
        whole = (
            content["plan"] == plan
            and content["sha256"] == seal_index(content)["sha256"]
            and entry["bytes"] == path.stat().st_size
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if whole else None


def check_tokens(
    document: int, token_ids: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int
) -> None:
    """Refuse an empty document, a loss mask of another length, and unknown tokens.

    Args:
        document: its number, for the message.
        token_ids: ``[n]``.
        loss_mask: must be ``[n]``.
        vocab_size: ids must be below.
    """
    length = int(token_ids.numel())
    if length == 0:
        raise ConfigError(f"document {document} is empty")
    if tuple(token_ids.shape) != (length,) or tuple(loss_mask.shape) != (length,):
        raise ConfigError(
            f"document {document} with {length} tokens needs token_ids and loss_mask of shape "
            f"[{length}], got {list(token_ids.shape)} and {list(loss_mask.shape)}"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"document {document} has token {low if low < 0 else high}, outside the vocabulary of "
            f"{vocab_size}"
        )


def check_states(
    rows: str,
    num_rows: int,
    meta: StoreMeta,
    features: torch.Tensor | None,
    final_hidden: torch.Tensor | None,
) -> None:
    """Refuse features or final hidden states that the store does not hold as they are.

    Args:
        rows: what they are of, for the message.
        num_rows: n.
        meta: of the store.
        features: must be ``[n, C * d]``, and None in a token store.
        final_hidden: must be ``[n, d]`` in stores that hold them, None elsewhere.
    """
    for name, tensor, wanted, width in (
        ("features", features, meta.has_features, meta.feature_width),
        ("final hidden states", final_hidden, meta.final_hidden, meta.final_width),
    ):
        expected = [num_rows, width] if wanted else None
        found = None if tensor is None else list(tensor.shape)
        if found != expected:
            raise ConfigError(f"{rows} needs {name} of shape {expected}, got {found}")
