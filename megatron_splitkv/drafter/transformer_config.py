"""Megatron's configuration of a drafter, and what of Megatron a drafter cannot use."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig

_RECOMPUTE_MODULES = {"core_attn", "mlp"}


def build_transformer_config(
    dflash: DFlashConfig, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Return the Megatron configuration of a drafter, checked.

    Args:
        dflash: the drafter.
        overrides: further fields of `TransformerConfig`; they win.

    Raises:
        ConfigError: see `check_transformer_config`.
    """
    fields = {
        **_architecture(dflash),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        **overrides,
    }
    if fields.get("context_parallel_size", 1) > 1:
        fields.setdefault("cp_comm_type", "splitkv")
    config = TransformerConfig(**fields)
    check_transformer_config(config, dflash)
    return config


def check_transformer_config(config: TransformerConfig, dflash: DFlashConfig) -> None:
    """Refuse a Megatron configuration that is not this drafter's or that it cannot run under.

    Args:
        config: what Megatron builds its modules from.
        dflash: the drafter.

    Raises:
        ConfigError: naming the field, its value and the allowed one.
    """
    for name, expected in _architecture(dflash).items():
        value = getattr(config, name)
        if value != expected:
            raise ConfigError(
                f"Megatron's {name} is {_show(value)}, the drafter needs {_show(expected)}"
            )
    requirements = {
        "pipeline_model_parallel_size": (1, "a drafter is a few layers: use tensor parallelism"),
        "sequence_parallel": (False, "context parallelism splits the rows everywhere"),
        "attention_dropout": (0.0, "split-KV attention has no dropout"),
        "fp32_residual_connection": (False, "the residual stays in the parameters' dtype"),
        "layernorm_zero_centered_gamma": (False, "exported norms have plain weights"),
        "num_moe_experts": (None, "the drafter's MLP is dense"),
        "calculate_per_token_loss": (True, "set --calculate-per-token-loss"),
        "fine_grained_activation_offloading": (False, "recompute activations instead"),
        "cuda_graph_impl": ("none", "a batch's shapes change from step to step"),
        "window_size": (None, "sliding layers are the drafter's (layer_types, sliding_window)"),
        "use_mup": (False, "scales are the drafter's (input_embedding_scale)"),
    }
    for name, (allowed, advice) in requirements.items():
        value = getattr(config, name, allowed)  # older versions lack some
        if value != allowed:
            raise ConfigError(f"{name} is {value!r}, it must be {allowed!r}: {advice}")
    if config.num_query_groups % config.tensor_model_parallel_size:
        raise ConfigError(
            f"{config.num_query_groups} key/value heads cannot be split over a tensor-parallel "
            f"size of {config.tensor_model_parallel_size}; use a divisor"
        )
    if config.recompute_granularity == "selective":
        unknown = set(config.recompute_modules) - _RECOMPUTE_MODULES
        if unknown:
            raise ConfigError(
                f"recompute module {min(unknown)!r} is not supported; choose among: "
                f"{', '.join(sorted(_RECOMPUTE_MODULES))}"
            )


def _architecture(dflash: DFlashConfig) -> dict[str, Any]:
    return {
        "num_layers": dflash.num_layers,
        "hidden_size": dflash.hidden_size,
        "ffn_hidden_size": dflash.ffn_hidden_size,
        "num_attention_heads": dflash.num_attention_heads,
        "num_query_groups": dflash.num_key_value_heads,
        "kv_channels": dflash.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": dflash.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
    }


def _show(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)
