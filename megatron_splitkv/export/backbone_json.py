"""The Qwen3 keys of a drafter's ``config.json``, which all public layouts share.

Serving engines differ in where they look: the rotary base is nested in new releases of transformers
and flat in old ones. Both are written; what is read must not contradict itself.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import FULL_ATTENTION, SLIDING_ATTENTION, DFlashConfig

# What a key may say, if it is there and not null: anything else is another architecture.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "quantization_config": (),
}


def qwen3_keys(config: DFlashConfig) -> dict[str, Any]:
    """Describe the backbone the way transformers describes a Qwen3 model.

    Args:
        config: the drafter.
    """
    eos = list(config.eos_token_ids)
    slides = SLIDING_ATTENTION in config.layer_types
    return {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "is_neox_style": True,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        # transformers forgets the window where this is false.
        "use_sliding_window": slides,
        "max_window_layers": config.num_layers,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
    }


def backbone_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `DFlashConfig` that the Qwen3 keys decide.

    Args:
        values: the keys, ours or another exporter's.

    Raises:
        ConfigError: a key is missing, or says something that no supported drafter has.
    """
    refuse_other_values(values, _ONLY)
    layer_types, window = _layers(values)
    eos = values.get("eos_token_id")
    return {
        "num_layers": required(values, "num_hidden_layers"),
        "hidden_size": required(values, "hidden_size"),
        "ffn_hidden_size": required(values, "intermediate_size"),
        "num_attention_heads": required(values, "num_attention_heads"),
        "num_key_value_heads": required(values, "num_key_value_heads"),
        "head_dim": required(values, "head_dim"),
        "vocab_size": required(values, "vocab_size"),
        "rope_theta": _rope_theta(values),
        "rms_norm_eps": required(values, "rms_norm_eps"),
        "max_position_embeddings": required(values, "max_position_embeddings"),
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "pad_token_id": values.get("pad_token_id"),
        "layer_types": layer_types,
        "sliding_window": window,
    }


def required(values: Mapping[str, Any], name: str) -> Any:
    """A key's value.

    Raises:
        ConfigError: it is missing or null.
    """
    if values.get(name) is None:
        raise ConfigError(f"config.json of the drafter lacks {name!r}")
    return values[name]


def refuse_other_values(
    values: Mapping[str, Any], accepted: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse keys that are there, are not null and say anything but what is accepted.

    Raises:
        ConfigError: naming the key and its value.
    """
    for name, choices in accepted.items():
        value = values.get(name)
        if value is not None and value not in choices:
            known = f", only {choices[0]!r}" if choices else ""
            raise ConfigError(f"a drafter with {name} {value!r} is not supported{known}")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _layers(values: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window, by the rules of transformers' Qwen3 configuration.

    Without ``layer_types`` the layers from ``max_window_layers`` on slide. A sliding layer of a
    drafter is causal in its own block, a full one is not; ``is_causal`` overrules both.

    Source: transformers, `models/qwen3/configuration_qwen3.py`; z-lab/dflash, `dflash/model.py`,
    `Qwen3DFlashAttention`; vllm-project/speculators, `models/dflash/config.py`.
    """
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    types = values.get("layer_types")
    if types is None:
        layers = required(values, "num_hidden_layers")
        first = layers
        if window is not None:
            first = required({"max_window_layers": 28, **values}, "max_window_layers")
        types = [SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(layers)]
    slides = SLIDING_ATTENTION in types
    causal = values.get("is_causal")
    if causal is not None and any((kind == SLIDING_ATTENTION) != causal for kind in types):
        raise ConfigError(
            f"is_causal {causal!r} with layers of {', '.join(sorted(set(types)))} is not "
            "supported: sliding layers are causal inside their block and full ones are not"
        )
    if slides and values.get("sliding_window_non_causal"):
        raise ConfigError("sliding_window_non_causal true is not supported, only false")
    return tuple(types), window if slides else None


def _rope_theta(values: Mapping[str, Any]) -> float:
    theta = values.get("rope_theta")
    # Releases of transformers differ in which of the two they read.
    for name in ("rope_parameters", "rope_scaling"):
        nested = values.get(name) or {}
        if any(isinstance(value, Mapping) for value in nested.values()):
            raise ConfigError(f"{name} by layer type are not supported, only one for all")
        for key in ("rope_type", "type"):
            if nested.get(key, "default") != "default":
                raise ConfigError(
                    f"rotary embedding {nested[key]!r} is not supported, only the unscaled one; "
                    f"it is in {name}"
                )
        refuse_other_values(nested, {"partial_rotary_factor": (1,), "factor": (1,)})
        inner = nested.get("rope_theta")
        if None not in (inner, theta) and inner != theta:
            raise ConfigError(f"rope_theta is {theta}, in {name} it is {inner}; make them the same")
        theta = inner if theta is None else theta
    if theta is None:
        raise ConfigError("config.json of the drafter lacks 'rope_theta'")
    return float(theta)
