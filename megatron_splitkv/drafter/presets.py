"""The shapes of published drafters, by the name of their target.

``qwen3.5-27b`` is the shape that the paper measures, all its layers with full attention; the
released drafter of that size is ``qwen3.6-27b``, most of whose layers slide. ``smollm2-135m`` is
nobody's release: a drafter of the size that the quick start trains for SmolLM2-135M-Instruct.

Source:
    Sizes, tapped layers, mask tokens and layer types: configurations of the z-lab drafters on
    Hugging Face. SmolLM2's: its configuration, as transformers reads it.
"""

from typing import Any

from megatron_splitkv.data.meta import default_target_layer_ids

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "num_layers": 5,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_target_layers": 36,
        "target_layer_ids": default_target_layer_ids(36, 5),
        "mask_token_id": 151669,
        "bos_token_id": 151643,
        "eos_token_ids": (151645,),
        "pad_token_id": 151643,
    },
    "qwen3.5-35b-a3b": {
        "num_layers": 8,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 248320,
        "num_target_layers": 40,
        "target_layer_ids": default_target_layer_ids(40, 5),
        "mask_token_id": 248070,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
    },
    "qwen3.5-27b": {
        "num_layers": 5,
        "hidden_size": 5120,
        "ffn_hidden_size": 17408,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "num_target_layers": 64,
        "target_layer_ids": default_target_layer_ids(64, 5),
        "mask_token_id": 248070,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
    },
    "smollm2-135m": {
        "num_layers": 2,
        "hidden_size": 576,
        "ffn_hidden_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "num_target_layers": 30,
        "target_layer_ids": default_target_layer_ids(30, 3),
        "mask_token_id": 16,  # <empty_output>, of code notebooks alone
        "block_size": 8,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "loss_decay_gamma": 4.0,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": 2,
    },
}
PRESETS["qwen3.6-27b"] = PRESETS["qwen3.5-27b"] | {
    "layer_types": ("sliding_attention",) * 4 + ("full_attention",),
    "sliding_window": 2048,
}
