"""Targets in one GGUF file: transformers unpacks the weights into an ordinary dense model.

The weights are those that the file's blocks stand for, in full precision: features of a quantised
target are the quantised target's own. Unpacking takes several times as long as loading the result.
"""

import os
from pathlib import Path

import safetensors.torch
import torch

from megatron_splitkv.data.partial import folder_written_aside
from megatron_splitkv.data.target import load_target, load_tokenizer


def unpack_gguf(file: str | os.PathLike[str], folder: Path) -> None:
    """Unpack a GGUF file into a Hugging Face folder of fp32 safetensors, tokenizer included.

    The folder appears whole or not at all.

    Args:
        file: of one part, with an architecture that transformers reads.
        folder: where to; its parents are made.

    Raises:
        ConfigError: no GGUF file, or one that transformers cannot read.
    """
    model, tokenizer = load_target(file, torch.float32), load_tokenizer(file)
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.architectures = [type(model).__name__]
    weights = model.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    with folder_written_aside(folder) as aside:
        # `save_pretrained` of the model itself refuses a GGUF model, unpacked or not.
        config.save_pretrained(aside)
        model.generation_config.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        safetensors.torch.save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
