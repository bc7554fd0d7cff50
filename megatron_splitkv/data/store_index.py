"""index.json: what a store holds, file by file, sealed by a checksum of its own."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import SCHEMA_VERSION, StoreMeta
from megatron_splitkv.data.partial import write_aside
from megatron_splitkv.data.shard import ShardEntry, ShardLayout, file_sha256, seal_index

INDEX_FILE = "index.json"


@dataclass(frozen=True)
class StoreFile:
    """A file whose size and checksum a record lists."""

    path: Path
    bytes: int
    sha256: str

    def problem(self, *, full: bool) -> str | None:
        """What is wrong with it, in one line; None if nothing is.

        Args:
            full: compare the SHA-256, too, not only the size.
        """
        if not self.path.is_file():
            return f"{self.path} is missing; prepare it again with --overwrite"
        found = self.path.stat().st_size
        if found != self.bytes:
            return (
                f"{self.path} has {found} bytes, expected {self.bytes} (checksum sha256 "
                f"{self.sha256}): it is truncated or was overwritten; prepare it again "
                "with --overwrite"
            )
        try:
            digest = file_sha256(self.path) if full else self.sha256
        except OSError as error:
            return (
                f"{self.path} cannot be read: {error.strerror}; prepare it again with --overwrite"
            )
        if digest != self.sha256:
            return (
                f"{self.path} is corrupted: checksum sha256 {digest}, expected {self.sha256}; "
                "prepare it again with --overwrite"
            )
        return None


@dataclass(frozen=True)
class StoreIndex:
    """The content of index.json.

    Args:
        meta: target, tapped layers, dtype.
        shards: entries in the order of the documents.
        frozen: file, bytes and sha256 of the target's embedding and head, if the store has them.
    """

    meta: StoreMeta
    shards: tuple[ShardEntry, ...]
    frozen: dict[str, Any] | None

    def layouts(self) -> list[ShardLayout]:
        """Where the tensors of each shard lie."""
        widths = self.meta.feature_width, self.meta.dtype, self.meta.final_width
        return [ShardLayout.of(shard.rows, *widths) for shard in self.shards]

    def files(self, folder: Path) -> Iterator[StoreFile]:
        """Every file that the store consists of, beside the index."""
        for shard in self.shards:
            yield StoreFile(folder / shard.file, shard.bytes, shard.sha256)
        if self.frozen is not None:
            yield frozen_file(folder, self.frozen)

    def write(self, folder: Path) -> None:
        """Write index.json, which makes the folder a store."""
        index = {
            "schema_version": self.meta.schema_version,
            **self.meta.to_json(),
            "frozen": self.frozen,
            "shards": [shard.to_json() for shard in self.shards],
        }
        write_aside(folder / INDEX_FILE, json.dumps(seal_index(index), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a store's index; its files are not looked at.

        Raises:
            ConfigError: no store, another schema version, a damaged index, or one whose shards
                cannot have the sizes that it says.
        """
        content = _read_json(folder)
        file = folder / INDEX_FILE
        try:
            frozen = content["frozen"]
            index = cls(
                StoreMeta.from_json(content),
                tuple(ShardEntry.from_json(shard) for shard in content["shards"]),
                None if frozen is None else {k: frozen[k] for k in ("file", "bytes", "sha256")},
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is incomplete: {error!r}") from error
        if not index.shards:
            raise ConfigError(f"{file} lists no shard; prepare it again with --overwrite")
        for shard, layout in zip(index.shards, index.layouts(), strict=True):
            if layout.end != shard.bytes:
                raise ConfigError(
                    f"{folder / shard.file}: {shard.rows} rows of "
                    f"{layout.row_bytes + layout.final_row_bytes} bytes make {layout.end} bytes, "
                    f"the index says {shard.bytes}"
                )
        return index


def frozen_file(folder: Path, entry: dict[str, Any]) -> StoreFile:
    """The file of the target's embedding and head."""
    return StoreFile(folder / entry["file"], entry["bytes"], entry["sha256"])


def _read_json(path: Path) -> dict[str, Any]:
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
            f"{expected}; prepare it again with --overwrite"
        )
    return index
