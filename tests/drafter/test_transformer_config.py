"""Megatron's configuration of a drafter, and the layer spec."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig, check_transformer_config, get_dflash_layer_spec
from megatron_splitkv.drafter.specs import with_window
from tests.drafter.harness import TINY


def test_architecture_reaches_megatron() -> None:
    config = DFlashConfig.preset("qwen3.5-35b-a3b").to_transformer_config(
        tensor_model_parallel_size=2, context_parallel_size=4
    )
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (8, 2048, 6144)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (32, 4, 128)
    assert config.layernorm_epsilon == 1e-6
    assert config.activation_func is F.silu
    assert config.qk_layernorm
    assert config.cp_comm_type == "splitkv"
    assert config.calculate_per_token_loss


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
            "pipeline_model_parallel_size is 2, it must be 1",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"calculate_per_token_loss": False}, "set --calculate-per-token-loss"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "sequence_parallel is True"),
        ({"tensor_model_parallel_size": 4}, "2 key/value heads cannot be split over"),
        ({"layernorm_epsilon": 1e-5}, "layernorm_epsilon is 1e-05, the drafter needs 1e-06"),
        ({"activation_func": F.gelu}, "activation_func is gelu, the drafter needs silu"),
        ({"num_layers": 4}, "num_layers is 4, the drafter needs 2"),
        ({"window_size": (8, 0)}, r"window_size is \(8, 0\), .*layer_types, sliding_window"),
        ({"use_mup": True}, "use_mup is True, .*input_embedding_scale"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "recompute module 'layernorm' is not supported; choose among: core_attn, mlp",
        ),
    ],
)
def test_what_a_drafter_cannot_do_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TINY.to_transformer_config(**overrides)


def test_a_configuration_of_another_drafter_is_refused() -> None:
    config = TINY.to_transformer_config()
    other = replace(TINY, hidden_size=64)
    with pytest.raises(ConfigError, match="hidden_size is 32, the drafter needs 64"):
        check_transformer_config(config, other)


def test_unknown_backend_and_missing_transformer_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of: local, transformer_engine"):
        get_dflash_layer_spec("te")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
            get_dflash_layer_spec("transformer_engine")


def test_the_spec_takes_any_provider() -> None:
    class Provider:
        def layer_norm(self, rms_norm: bool, for_qk: bool = False) -> str:
            return "head norm" if for_qk else "norm"

        def column_parallel_linear(self) -> str:
            return "column"

        def row_parallel_linear(self) -> str:
            return "row"

    options = SplitKVOptions(gather="hidden")
    spec = get_dflash_layer_spec(Provider(), attention_kernel="naive", splitkv=options)
    attention = spec.submodules.self_attention.submodules
    assert (attention.linear_q, attention.linear_kv, attention.linear_proj) == (
        "column",
        "column",
        "row",
    )
    assert (spec.submodules.input_layernorm, attention.k_layernorm) == ("norm", "head norm")
    assert attention.core_attention.keywords == {"kernel": "naive", "options": options}


def test_a_window_reaches_the_layers_that_slide_and_leaves_the_spec_alone() -> None:
    spec = get_dflash_layer_spec(attention_kernel="naive")
    assert with_window(spec, None) is spec
    sliding = with_window(spec, 9)
    core, plain = (s.submodules.self_attention.submodules.core_attention for s in (sliding, spec))
    assert core.keywords == plain.keywords | {"block_window": 9}
    assert "block_window" not in plain.keywords
    assert sliding.submodules.mlp is spec.submodules.mlp
