"""From a Megatron checkpoint folder to a drafter that the serving engines load."""

import os
from pathlib import Path

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DRAFTER_CONFIG_FILE, DFlashConfig
from megatron_splitkv.export.checkpoint import find_iteration, read_model_tensors
from megatron_splitkv.export.folder import write_drafter
from megatron_splitkv.export.zlab import to_zlab


def export_drafter(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Export a trained drafter in the z-lab layout.

    Args:
        checkpoint: Megatron's ``--save``: iterations and ``drafter_config.json``.
        output: the folder to write.
        iteration: which checkpoint; the latest when None.
        dtype: of the exported tensors; as trained when None.

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
    config = DFlashConfig.load(config_file)
    tensors = to_zlab(read_model_tensors(path), config)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    write_drafter(output, tensors, config)
    return path
