"""From a Megatron checkpoint, or from another public layout, to a folder that engines load."""

import json
import os
from pathlib import Path

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE
from megatron_splitkv.drafter.kinds import load_config
from megatron_splitkv.export.checkpoint import find_iteration, read_model_tensors
from megatron_splitkv.export.folder import read_drafter, write_drafter
from megatron_splitkv.export.zlab import to_zlab


def export_drafter(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    dtype: torch.dtype | None = None,
    layout: str = "zlab",
    target: str | None = None,
) -> Path:
    """Export a trained drafter, whatever parallel layout trained it.

    Args:
        checkpoint: Megatron's ``--save``: iterations and ``drafter_config.json``.
        output: the folder to write.
        iteration: which checkpoint; the latest when None.
        dtype: of the exported tensors; as trained when None.
        layout: one of `folder.LAYOUTS`.
        target: folder or name of the model that it drafts for; what training noted when None.

    Returns:
        The folder of the iteration that was exported.

    Raises:
        ConfigError: no such checkpoint, or one that is not of the drafter it says it is.
    """
    path = find_iteration(checkpoint, iteration)
    config_file = Path(checkpoint) / DRAFTER_CONFIG_FILE
    if not config_file.is_file():
        raise ConfigError(
            f"{checkpoint} has no {DRAFTER_CONFIG_FILE}, which training writes beside its "
            "checkpoints; put the drafter's there"
        )
    config = load_config(config_file)
    if target is None:
        target = json.loads(config_file.read_text()).get("target_id")
    tensors = _cast(to_zlab(read_model_tensors(path), config), dtype)
    write_drafter(output, tensors, config, layout=layout, target=target)
    return path


def convert_drafter(
    drafter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layout: str = "zlab",
    target: str | None = None,
) -> Path:
    """Rewrite an exported or released drafter in another layout or dtype.

    Args:
        drafter: a folder in a public layout, ours or another exporter's.
        output: as in `export_drafter`.
        dtype: likewise; as it is when None.
        layout: likewise.
        target: likewise, without a note to fall back to.

    Returns:
        The folder that was read.

    Raises:
        ConfigError: a folder that cannot be read, or that the layout cannot describe.
    """
    config, tensors = read_drafter(drafter)
    write_drafter(output, _cast(tensors, dtype), config, layout=layout, target=target)
    return Path(drafter)


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if dtype is None:
        return tensors
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
