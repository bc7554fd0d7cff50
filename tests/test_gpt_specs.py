"""Specs for Megatron's ``--spec``: its own GPT layer, but for the core attention."""

from typing import Any

import pytest
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import import_module

from megatron_splitkv import compat, gpt_specs
from megatron_splitkv.attention import SplitKVCoreAttention
from megatron_splitkv.config import ConfigError


def _attention(spec: Any) -> Any:
    return spec.submodules.self_attention.submodules


def test_spec_names_a_layer_as_megatron_looks_it_up() -> None:
    layer = import_module(("megatron_splitkv.gpt_specs", "local_layer"))
    assert _attention(layer).core_attention is SplitKVCoreAttention
    stock = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    assert _attention(stock).core_attention is not SplitKVCoreAttention  # not changed in passing
    assert layer.module is stock.module
    assert _attention(layer).linear_qkv is _attention(stock).linear_qkv
    assert layer.submodules.input_layernorm is stock.submodules.input_layernorm
    has_layer = hasattr(gpt_specs, "transformer_engine_layer")
    assert has_layer == compat.has_transformer_engine()


@pytest.mark.parametrize(
    ("backend", "builder"),
    [
        ("local", "get_gpt_layer_local_spec"),
        ("transformer_engine", "get_gpt_layer_with_transformer_engine_spec"),
    ],
)
def test_arguments_reach_the_backends_own_builder(
    monkeypatch: pytest.MonkeyPatch, backend: str, builder: str
) -> None:
    spec, given = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"), {}

    def build(**arguments: Any) -> Any:
        given.update(arguments)
        return spec

    monkeypatch.setattr(gpt_layer_specs, builder, build)
    assert gpt_specs.get_gpt_layer_spec(backend, qk_layernorm=True) is spec
    assert given == {"qk_layernorm": True}
    assert _attention(spec).core_attention is SplitKVCoreAttention


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--transformer-impl 'te' is not known"):
        gpt_specs.get_gpt_layer_spec("te")
