"""Finds and reads the drafter in a Megatron checkpoint folder, in one plain process.

No model is built, no process group and no GPU is needed, and the layout that trained the drafter
does not matter: a torch_dist checkpoint describes whole tensors.
"""

import os
import re
from pathlib import Path

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export.dcp_reader import TensorReader

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_METADATA_FILE = ".metadata"
# Optimizer states lie beside the model under one of these first words.
_OPTIMIZER = re.compile(r"(optimizer|chained_\d+)\.")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")


def find_iteration(folder: str | os.PathLike[str], iteration: int | None = None) -> Path:
    """Return the folder of one iteration's checkpoint.

    Args:
        folder: Megatron's ``--save``.
        iteration: which one; the latest that was completely written when None.

    Raises:
        ConfigError: there is no checkpoint, or not this one, or not in the torch_dist format.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"checkpoint folder {root} does not exist")
    if iteration is None:
        iteration = _latest(root)
    path = root / f"iter_{iteration:07d}"
    if not path.is_dir():
        raise ConfigError(f"{root} has no iteration {iteration}; it has {_available(root)}")
    if not (path / _METADATA_FILE).is_file():
        raise ConfigError(
            f"{path} is no torch_dist checkpoint: it has no {_METADATA_FILE}; train with "
            "--ckpt-format torch_dist"
        )
    return path


def read_model_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read the model of one iteration, whole and unsharded, optimizer left out.

    Megatron stores equal layers stacked on a leading axis (``decoder.layers.mlp...``) and unequal
    ones by number; here they always come by number.

    Args:
        path: from `find_iteration`.

    Raises:
        ConfigError: the checkpoint is unreadable or holds no model.
    """
    reader = TensorReader(path)
    names = {name for name in reader.tensors if not _OPTIMIZER.match(name)}
    if not names:
        raise ConfigError(f"checkpoint {path} holds no model tensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in reader.read(names).items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None:
            tensors[name] = tensor
            continue
        layers, rest = stacked.groups()
        tensors |= {f"{layers}.{i}.{rest}": layer for i, layer in enumerate(tensor)}
    return tensors


def _latest(root: Path) -> int:
    tracker = root / TRACKER_FILE
    try:
        text = tracker.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{root} is no Megatron checkpoint folder: it has no {TRACKER_FILE}; give the folder "
            "that was --save"
        ) from error
    if not text.isdigit():
        raise ConfigError(f"{tracker} says {text!r}, not an iteration; name one with --iteration")
    return int(text)


def _available(root: Path) -> str:
    found = sorted(int(p.name[5:]) for p in root.glob("iter_*") if p.name[5:].isdigit())
    return ", ".join(map(str, found)) if found else "none"
