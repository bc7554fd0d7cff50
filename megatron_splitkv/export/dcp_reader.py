"""Reads torch_dist checkpoints without trusting them.

``torch.distributed.checkpoint`` unpickles a checkpoint's ``.metadata`` file without restriction,
and a pickle may run any code. What the file really holds is a table of tensors: names, shapes,
dtypes, files and offsets. `TensorReader` unpickles nothing else, and of the data files it asks for
tensors only, which torch reads with ``weights_only=True``. Megatron's ``common.pt`` and the byte
objects of a checkpoint (arguments, random states, scheduler) are never opened.
"""

import dataclasses
import enum
import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron_splitkv.config import ConfigError

_TABLE_MODULES = frozenset(
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner")
)
_PLAIN = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)


class TensorReader(dcp.FileSystemReader):
    """A checkpoint's tensors, without anything that could run code.

    Args:
        path: an iteration's folder.

    Raises:
        ConfigError: the metadata is unreadable or names something that is not part of a table of
            tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata = self._read_table()

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds, byte objects left out."""
        return {
            name: stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table, as `torch.distributed.checkpoint` asks for it."""
        return self._metadata

    def read(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Read whole tensors in this process, however they were sharded.

        Args:
            names: keys of `tensors`.
        """
        stored = self.tensors
        values: dict[str, Any] = {
            name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            for name in sorted(names)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(values, storage_reader=self, no_dist=True)
            except (OSError, RuntimeError, EOFError, CheckpointException) as error:
                raise ConfigError(
                    f"checkpoint {self.path} is damaged: {_last_line(error)}; export another "
                    "iteration"
                ) from error
        return values

    def check_files(self) -> None:
        """Refuse data files that are missing or shorter than the table says.

        Raises:
            ConfigError: naming the file.
        """
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), end)
        for name, end in ends.items():
            file = Path(self.path) / name
            if not file.is_file():
                raise ConfigError(f"{file} is missing although the checkpoint's table lists it")
            size = file.stat().st_size
            if size < end:
                raise ConfigError(
                    f"{file} has {size} bytes, the checkpoint's table needs {end}: it is truncated"
                )

    def _read_table(self) -> Metadata:
        path = self._get_metadata_path()
        try:
            with open(path, "rb") as file:
                metadata = _TableUnpickler(file).load()
        except (OSError, EOFError, ValueError, AttributeError, pickle.UnpicklingError) as error:
            raise ConfigError(f"checkpoint metadata {path} is unreadable: {error}") from error
        if not isinstance(metadata, Metadata):
            raise ConfigError(f"checkpoint metadata {path} is no table of tensors")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class _TableUnpickler(pickle.Unpickler):
    """Resolves the names of a table of tensors and refuses all others."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _TABLE_MODULES and "." not in name:
            found = super().find_class(module, name)
            is_record = dataclasses.is_dataclass(found) or (
                isinstance(found, type) and issubclass(found, enum.Enum)
            )
            if is_record and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of tensors needs")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
