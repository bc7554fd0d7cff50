"""Offline data of SpecForge: one ``torch.save`` dict a sample, ``data_{i}.ckpt`` or ``.ckpt.gz``.

Its DFlash family writes ``input_ids``, ``loss_mask`` and ``hidden_states``, its DSpark also
``target_last_hidden_states``; its EAGLE-3 writes ``aux_hidden_state`` (the tapped layers) and
``hidden_state`` (what the target's head reads). Layers are numbered as here, from 0, by output.

Files are unpickled with ``weights_only``, so that one from a stranger runs no code.

Source:
    SpecForge ``scripts/prepare_hidden_states.py``, ``specforge/algorithms/common/
    hidden_states_data.py`` and ``specforge/runtime/data_plane/offline_reader.py`` (layout only).
"""

import gzip
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.offline_data import (
    OfflineSample,
    check_lengths,
    natural_order,
    row_matrix,
    row_vector,
)
from megatron_splitkv.data.partial import DiskFullError, full_disk_explained

_SUFFIXES = (".ckpt", ".ckpt.gz")
_ID_DTYPES = (torch.int64, torch.int32)
# Names of the tapped and of the final hidden states, in SpecForge's layouts.
_LAYOUTS = (("hidden_states", "target_last_hidden_states"), ("aux_hidden_state", "hidden_state"))


class SpecForgeData:
    """Samples of a folder of SpecForge's feature files, subfolders included.

    Plain files are mapped, and only the rows that are asked for are read. A compressed one is
    unpacked to a temporary file (`tempfile.gettempdir`) each time it is opened.

    Args:
        folder: what SpecForge's ``--output-path`` was.

    Raises:
        ConfigError: no such folder, no feature file in it, or one both plain and compressed.
    """

    trainer = "SpecForge"
    layer_id_offset = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = [p for p in folder.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file()]
        self._paths = sorted(found, key=natural_order)
        if not found:
            reason = "holds no *.ckpt or *.ckpt.gz" if folder.is_dir() else "is no folder"
            raise ConfigError(
                f"{folder} {reason}; name the --output-path of SpecForge's prepare_hidden_states.py"
            )
        plain = set(self._paths)
        for path in self._paths:
            if path.suffix == ".gz" and path.with_suffix("") in plain:
                raise ConfigError(
                    f"{path.with_suffix('')} lies beside {path.name}; remove one of the two"
                )

    def __len__(self) -> int:
        return len(self._paths)

    def files(self) -> Sequence[Path]:
        """One a sample, in the order of the samples."""
        return self._paths

    def open(self, number: int) -> OfflineSample:
        """Open one sample, in the natural order of the file names.

        Raises:
            ConfigError: a file that is not of one of SpecForge's layouts, named.
        """
        path = self._paths[number]
        content = _load(path)
        missing = {"input_ids", "loss_mask"} - content.keys()
        layout = next((names for names in _LAYOUTS if names[0] in content), None)
        if missing or layout is None:
            raise ConfigError(
                f"{path} holds {', '.join(sorted(map(str, content))) or 'nothing'}, expected "
                "input_ids, loss_mask and hidden_states (or EAGLE-3's aux_hidden_state)"
            )
        for name in ("input_ids", "loss_mask", *layout):
            if name in content and not _is_dense(content[name]):
                raise ConfigError(f"{path}: {name} is no tensor; prepare it again with SpecForge")
        if (dtype := content["input_ids"].dtype) not in _ID_DTYPES:
            raise ConfigError(f"{path}: input_ids are {dtype}, expected int64 or int32")
        token_ids = row_vector(path, "input_ids", content["input_ids"]).long()
        loss_mask = row_vector(path, "loss_mask", content["loss_mask"]) != 0
        features = row_matrix(path, layout[0], content[layout[0]])
        final = row_matrix(path, layout[1], content[layout[1]]) if layout[1] in content else None
        lengths = {"input_ids": token_ids, "loss_mask": loss_mask, layout[0]: features}
        if final is not None:
            lengths[layout[1]] = final
        check_lengths(path, {name: tensor.shape[0] for name, tensor in lengths.items()})

        def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return features[start:stop], None if final is None else final[start:stop]

        width, dtype = 0, features.dtype
        if final is not None:
            width = final.shape[1]
            if final.dtype != dtype:
                raise ConfigError(
                    f"{path}: {layout[0]} are {dtype} and {layout[1]} {final.dtype}; prepare it "
                    "again with both of one dtype"
                )
        return OfflineSample(path, token_ids, loss_mask, features.shape[1], width, dtype, read)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".gz":
            # Random access to a gzip file starts anew at every step back; the unpacked copy is
            # mapped, and its blocks are freed when the last tensor goes.
            with (
                full_disk_explained(Path(tempfile.gettempdir()), "give the same command again"),
                gzip.open(path) as packed,
                tempfile.NamedTemporaryFile(suffix=".ckpt") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
                file.flush()
                content = torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DiskFullError:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise anything
        # Not torch's own words: they advise to load what is refused here.
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged, older than torch's "
            "zip format, or holds more than tensors, which is never unpickled; prepare it again "
            "with SpecForge"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected SpecForge's dict")
    return content
