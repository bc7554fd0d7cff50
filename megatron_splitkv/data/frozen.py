"""The target's frozen embedding and output head, one file of a store."""

import hashlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import TargetInfo
from megatron_splitkv.data.partial import write_aside

FROZEN_FILE = "target_frozen.safetensors"
EMBEDDING_KEY = "embed_tokens.weight"
HEAD_KEY = "lm_head.weight"


def write_frozen_file(
    folder: Path, target: TargetInfo, embedding: torch.Tensor, head: torch.Tensor
) -> dict[str, Any]:
    """Store the frozen embedding and head, once if they are the same tensor.

    Args:
        folder: of the store.
        target: whose they are.
        embedding: in the dtype that training shall use.
        head: likewise.

    Returns:
        The index entry.

    Shape:
        embedding, head: ``[vocab_size, d]``.

    Raises:
        ConfigError: another shape.
    """
    content = safetensors.torch.save(_frozen_tensors(target, embedding, head))
    write_aside(folder / FROZEN_FILE, content)
    digest = hashlib.sha256(content).hexdigest()
    return {"file": FROZEN_FILE, "bytes": len(content), "sha256": digest}


def holds_frozen(
    folder: Path, target: TargetInfo, embedding: torch.Tensor, head: torch.Tensor
) -> bool:
    """Whether the folder's file holds just these tensors."""
    tensors = _frozen_tensors(target, embedding, head)
    try:
        there = safetensors.torch.load_file(folder / FROZEN_FILE)
    except (OSError, safetensors.SafetensorError):
        return False
    return there.keys() == tensors.keys() and all(
        there[name].dtype == tensor.dtype and torch.equal(there[name], tensor.cpu())
        for name, tensor in tensors.items()
    )


def _frozen_tensors(
    target: TargetInfo, embedding: torch.Tensor, head: torch.Tensor
) -> dict[str, torch.Tensor]:
    tensors = {EMBEDDING_KEY: embedding.detach().contiguous()}
    if head.data_ptr() != embedding.data_ptr():
        tensors[HEAD_KEY] = head.detach().contiguous()
    shape = (target.vocab_size, target.hidden_size)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    return tensors
