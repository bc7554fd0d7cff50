"""The exported folder: ``config.json`` and ``model.safetensors``, whole or absent."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.export.config_json import from_config_json, to_config_json
from megatron_splitkv.export.zlab import check_tensors, zlab_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def write_drafter(
    folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], config: DFlashConfig
) -> None:
    """Write a drafter in the public layout, aside first and then renamed into place.

    Args:
        folder: where; an exported drafter that lies there is replaced.
        tensors: from `zlab.to_zlab`, all of one dtype.
        config: the drafter.

    Raises:
        ConfigError: the folder holds something else, or the tensors differ in dtype.
    """
    path = Path(folder)
    if path.exists() and not _is_replaceable(path):
        raise ConfigError(f"output {path} exists and is no exported drafter; choose a new folder")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(f"the drafter's tensors are of several dtypes ({found}); give one")
    aside, old = (path.with_name(f".{path.name}.{word}") for word in ("partial", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    # Readers of safetensors look for the framework here.
    save_file(dict(tensors), aside / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(to_config_json(config, dtypes.pop()), indent=2)
    (aside / CONFIG_FILE).write_text(text + "\n")
    # The library's writer shuts out other users, a server's among them.
    (aside / WEIGHTS_FILE).chmod((aside / CONFIG_FILE).stat().st_mode)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def read_drafter(
    folder: str | os.PathLike[str],
) -> tuple[DFlashConfig, dict[str, torch.Tensor]]:
    """Read an exported drafter: its configuration and its tensors by their public names.

    Args:
        folder: what `write_drafter` or another exporter of the layout wrote.

    Raises:
        ConfigError: a file is missing or unreadable, or the tensors are not the configuration's.
    """
    path = Path(folder)
    try:
        config = from_config_json(json.loads((path / CONFIG_FILE).read_text()))
        tensors = load_file(path / WEIGHTS_FILE)
    except ConfigError as error:
        raise ConfigError(f"drafter {path}: {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"drafter {path} cannot be read: {error}; export it again") from error
    check_tensors(tensors, zlab_shapes(config), f"drafter {path}")
    return config, tensors


def _is_replaceable(path: Path) -> bool:
    return path.is_dir() and {p.name for p in path.iterdir()} <= {CONFIG_FILE, WEIGHTS_FILE}
