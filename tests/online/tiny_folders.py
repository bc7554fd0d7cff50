"""Tiny random targets of every family that Megatron's GPT runs, as Hugging Face folders."""

from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "vocab_size": 61,  # odd: no even split over tensor parallelism
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
# Family and what differs from `SHAPE`.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, RoPE of llama 3": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, no groups": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 12}),  # heads wider than the hidden size has room for
    "qwen3, linear RoPE": (
        "Qwen3",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3},
        },
    ),
}


def random_target(name: str) -> Any:
    """A model whose every tensor differs from every other, biases and norms too."""
    import transformers

    family, changes = TARGETS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(len(name))
    for key, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * drawn if key.endswith("norm.weight") else 0.25 * drawn)
    return model


def save_target(name: str, folder: Path, **arguments: Any) -> Any:
    """Write a random target; returns it."""
    model = random_target(name)
    model.save_pretrained(folder, **arguments)
    return model
