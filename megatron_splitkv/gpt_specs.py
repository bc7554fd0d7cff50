"""Megatron's own GPT layer with split-KV as its core attention, for scripts that take ``--spec``.

    --spec megatron_splitkv.gpt_specs local_layer --cp-comm-type splitkv
    --spec megatron_splitkv.gpt_specs transformer_engine_layer --cp-comm-type splitkv

Those two names are specs, as Megatron's ``--spec`` wants them; the second exists where Transformer
Engine is installed. `get_gpt_layer_spec` makes others. Megatron splits the batch as always.
"""

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec

from megatron_splitkv import compat
from megatron_splitkv.attention import SplitKVCoreAttention
from megatron_splitkv.config import require_choice


def get_gpt_layer_spec(backend: str = "local", **arguments: Any) -> ModuleSpec:
    """Return the spec of one GPT layer with split-KV attention.

    Args:
        backend: ``local`` or ``transformer_engine``, whose modules the rest of the layer is of.
        **arguments: of Megatron's `get_gpt_layer_local_spec` or
            `get_gpt_layer_with_transformer_engine_spec`, such as `qk_layernorm`.

    Raises:
        ConfigError: unknown backend.
    """
    require_choice("--transformer-impl", backend, ("local", "transformer_engine"))
    get_spec = {
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
        "transformer_engine": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
    }[backend]
    spec = get_spec(**arguments)
    spec.submodules.self_attention.submodules.core_attention = SplitKVCoreAttention
    return spec


# The norm of "RMSNorm" follows ``--normalization``; the other one is apex's LayerNorm.
local_layer = get_gpt_layer_spec("local", normalization="RMSNorm")
if compat.has_transformer_engine():
    transformer_engine_layer = get_gpt_layer_spec("transformer_engine")
