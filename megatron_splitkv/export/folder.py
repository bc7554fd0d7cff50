"""The exported folder: ``config.json``, ``model.safetensors`` and notes, whole or absent."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.export.backbone_json import dtype_name
from megatron_splitkv.export.config_json import from_config_json, to_config_json
from megatron_splitkv.export.json_input import read_object
from megatron_splitkv.export.safetensors_files import (
    WEIGHTS_FILE,
    read_tensors,
    without_vocabulary,
)
from megatron_splitkv.export.serving import SERVING_FILE, serving_notes
from megatron_splitkv.export.speculators_json import (
    KIND_KEY,
    from_speculators_json,
    to_speculators_json,
)
from megatron_splitkv.export.zlab import check_tensors, zlab_shapes

CONFIG_FILE = "config.json"
LAYOUTS = ("zlab", "speculators")
_OURS = frozenset({CONFIG_FILE, WEIGHTS_FILE, SERVING_FILE})


def write_drafter(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    config: DFlashConfig,
    *,
    layout: str = "zlab",
    target: str | None = None,
) -> None:
    """Write a drafter in a public layout, aside first and then renamed into place.

    An existing folder, or the one that a link leads to, stays and gets the new files.

    Args:
        folder: where; an exported drafter that lies there is replaced.
        tensors: from `zlab.to_zlab`, all of one dtype; views are copied.
        config: the drafter.
        layout: one of `LAYOUTS`; tensors have the same names in both.
        target: folder or name of the model that it drafts for, for the notes and for the
            speculators library.

    Raises:
        ConfigError: the folder holds something else, the tensors are not the drafter's, share
            memory or differ in dtype, or the layout does not know the kind of drafter.
    """
    require_choice("layout", layout, LAYOUTS)
    if not os.fspath(folder):
        raise ConfigError("output is empty; name the folder to write")
    path = Path(os.path.realpath(folder))
    if os.path.lexists(path) and not _is_replaceable(path):
        raise ConfigError(f"output {path} exists and is no exported drafter; choose a new folder")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(dtype_name, dtypes)))
        raise ConfigError(f"the drafter's tensors are of several dtypes ({found}); give one")
    check_tensors(tensors, zlab_shapes(config), "the drafter")
    _refuse_ties(tensors)
    if layout == "zlab":
        values = to_config_json(config, dtypes.pop())
    else:
        values = to_speculators_json(config, dtypes.pop(), target=target)
    aside = path.with_name(f".{path.name}.partial")
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    aside.mkdir(parents=True)
    try:
        # The library takes neither strided nor overlapping views.
        own = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        # Readers of safetensors look for the framework here.
        save_file(own, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        (aside / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        (aside / SERVING_FILE).write_text(serving_notes(config, layout, target))
        # The library's writer shuts out other users, a server's among them.
        (aside / WEIGHTS_FILE).chmod((aside / CONFIG_FILE).stat().st_mode)
        _move(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_drafter(
    folder: str | os.PathLike[str], *, num_target_layers: int | None = None
) -> tuple[DFlashConfig, dict[str, torch.Tensor]]:
    """Read a drafter in a public layout: its configuration and its tensors by public names.

    Copies of the target's embedding and head, which some exporters add, are left out.

    Args:
        folder: what `write_drafter` or another exporter of the layouts wrote.
        num_target_layers: layers of the target, for folders that do not say it.

    Raises:
        ConfigError: a file is missing or unreadable, or the tensors are not the configuration's.
    """
    path = Path(folder)
    config = read_config(path, num_target_layers=num_target_layers)
    try:
        tensors = without_vocabulary(read_tensors(path), config)
    except ConfigError as error:
        raise ConfigError(f"drafter {path}: {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"drafter {path} cannot be read: {error}; export it again") from error
    check_tensors(tensors, zlab_shapes(config), f"drafter {path}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ConfigError(
                f"drafter {path} has {name} of {dtype_name(tensor.dtype)}: quantized drafters are "
                "not supported"
            )
    values = read_values(path)
    declared = values.get("dtype", values.get("torch_dtype"))
    found = sorted({dtype_name(tensor.dtype) for tensor in tensors.values()})
    if len(found) > 1 or declared not in (None, *found):
        said = "does not say which" if declared is None else f"says {declared}"
        raise ConfigError(
            f"drafter {path} has tensors of {', '.join(found)}, its config.json {said}; make them "
            "the same"
        )
    return config, tensors


def read_config(
    folder: str | os.PathLike[str], *, num_target_layers: int | None = None
) -> DFlashConfig:
    """Read the configuration alone of a drafter in a public layout.

    Args:
        folder: as for `read_drafter`.
        num_target_layers: likewise.

    Raises:
        ConfigError: naming the folder and what is missing or not supported.
    """
    values = read_values(folder)
    try:
        if KIND_KEY in values:
            return from_speculators_json(values, num_target_layers=num_target_layers)
        return from_config_json(values)
    except ConfigError as error:
        raise ConfigError(f"drafter {folder}: {error}") from error
    except RecursionError:
        raise ConfigError(f"drafter {folder}: its config.json is nested too deeply") from None


def read_values(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed ``config.json`` of a folder.

    Raises:
        ConfigError: there is none that can be read.
    """
    try:
        return read_object(Path(folder) / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter {folder} cannot be read: {error}") from error


def _is_replaceable(path: Path) -> bool:
    return path.is_dir() and all(p.name in _OURS and not p.is_dir() for p in path.iterdir())


def _move(aside: Path, path: Path) -> None:
    """Put what was written in its place; nobody reads a mixture of two drafters.

    A folder that exists is not replaced: a link, or the shell that asked, may be at it.
    """
    if not path.exists():
        aside.rename(path)
        return
    old = path.with_name(f".{path.name}.old")
    old.mkdir(exist_ok=True)
    # Without its configuration a folder is no drafter: it goes first and comes last. Until then
    # what was there lies beside.
    for name in (CONFIG_FILE, WEIGHTS_FILE, SERVING_FILE):
        if (path / name).exists():
            (path / name).replace(old / name)
    for name in (WEIGHTS_FILE, SERVING_FILE, CONFIG_FILE):
        (aside / name).replace(path / name)
    shutil.rmtree(old)


def _refuse_ties(tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors of one piece of memory would not be one in a file; parts of a fused one are fine."""
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        other = seen.setdefault(tensor.data_ptr(), name)
        if other != name:
            raise ConfigError(
                f"tensors {other} and {name} share their memory; tied tensors are not supported, "
                "give a copy of one"
            )
