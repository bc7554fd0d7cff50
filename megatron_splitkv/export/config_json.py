"""A drafter's ``config.json`` in the public z-lab layout, and back.

Serving engines differ in where they look: some read ``dflash_config`` first and the top level
second, some only one of them, and the rotary base is nested in new releases of transformers and
flat in old ones. Both places are written wherever one is read by somebody.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig

ARCHITECTURE = "DFlashDraftModel"
_FULL = "full_attention"
_OTHER_KINDS = (
    "projector_type",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)


def to_config_json(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Describe a drafter the way the public client and the serving engines read it.

    Args:
        config: the drafter.
        dtype: of the tensors beside it.
    """
    eos = list(config.eos_token_ids)
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
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
        "layer_types": [_FULL] * config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": config.num_layers,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
    }


def from_config_json(values: Mapping[str, Any]) -> DFlashConfig:
    """Read a public ``config.json``, ours or another exporter's.

    Args:
        values: the parsed file.

    Raises:
        ConfigError: a key is missing, or the drafter is of a kind that is not supported: sliding
            or causal layers, scaled rotary embedding, another head than the target's.
    """
    nested = values.get("dflash_config") or {}
    both = {**values, **nested}  # readers look into dflash_config first
    _refuse_other_kinds(both)
    rope = values.get("rope_parameters") or {}
    eos = values.get("eos_token_id")
    try:
        return DFlashConfig(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            num_attention_heads=values["num_attention_heads"],
            num_key_value_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            vocab_size=values["vocab_size"],
            num_target_layers=values["num_target_layers"],
            target_layer_ids=tuple(both["target_layer_ids"]),
            mask_token_id=both["mask_token_id"],
            block_size=both.get("block_size", 16),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 1e4))),
            rms_norm_eps=values["rms_norm_eps"],
            max_position_embeddings=values["max_position_embeddings"],
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=values.get("pad_token_id"),
        )
    except KeyError as error:
        raise ConfigError(f"config.json of the drafter lacks {error.args[0]!r}") from error


def _refuse_other_kinds(values: Mapping[str, Any]) -> None:
    other_layers = set(values.get("layer_types") or [_FULL]) - {_FULL}
    if other_layers or values.get("is_causal"):
        raise ConfigError(
            f"drafter layers of type {', '.join(sorted(other_layers)) or 'causal'} are not "
            "supported, only full_attention"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rotary embedding {kind!r} is not supported, only the unscaled one")
    for name in _OTHER_KINDS:
        value = values.get(name)
        if value not in (None, 1, "dflash"):
            raise ConfigError(f"a drafter with {name} {value!r} is not supported")
