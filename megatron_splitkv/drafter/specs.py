"""ModuleSpecs of the drafter's layer, with Megatron's own modules or Transformer Engine's."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer import ModuleSpec, TransformerLayerSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from megatron_splitkv.attention import SplitKVCoreAttention, SplitKVOptions
from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.drafter.attention import DFlashAttention, DFlashAttentionSubmodules
from megatron_splitkv.drafter.layer import DFlashLayer

BACKENDS = ("local", "transformer_engine")


def get_dflash_layer_spec(
    backend: str | BackendSpecProvider = "local",
    *,
    attention_kernel: str = "auto",
    splitkv: SplitKVOptions = SplitKVOptions(),
) -> ModuleSpec:
    """Return the spec of one drafter layer.

    Norms and linears stay separate modules with either backend: attention needs the normed rows
    twice, and so a checkpoint has the same names whichever backend wrote it. Windows of sliding
    layers are the drafter's: the model gives each layer its own.

    Args:
        backend: ``local``, ``transformer_engine``, or a provider of Megatron modules.
        attention_kernel: local attention kernel, one of `config.KERNELS`.
        splitkv: what split-KV communicates and keeps.

    Raises:
        ConfigError: unknown backend, or Transformer Engine is not installed.
    """
    provider = _provider(backend) if isinstance(backend, str) else backend
    norm = provider.layer_norm(rms_norm=True)
    head_norm = provider.layer_norm(rms_norm=True, for_qk=True)
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    attention = DFlashAttentionSubmodules(
        linear_q=column,
        linear_kv=column,
        core_attention=partial(SplitKVCoreAttention, kernel=attention_kernel, options=splitkv),
        linear_proj=row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=DFlashLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=DFlashAttention, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=partial(
                MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def with_window(layer_spec: ModuleSpec, window: int | None) -> ModuleSpec:
    """Return the spec of a layer whose queries see no keys that far before them.

    Args:
        layer_spec: of `get_dflash_layer_spec`, or alike.
        window: `DFlashConfig.windows` of the layer; None, full attention, leaves the spec as it is.
    """
    if window is None:
        return layer_spec
    layer, attention = layer_spec.submodules, layer_spec.submodules.self_attention
    core_attention = partial(attention.submodules.core_attention, block_window=window)
    submodules = replace(attention.submodules, core_attention=core_attention)
    attention = replace(attention, submodules=submodules)
    return replace(layer_spec, submodules=replace(layer, self_attention=attention))


def _provider(backend: str) -> Any:
    require_choice("--transformer-impl", backend, BACKENDS)
    if backend == "local":
        return LocalSpecProvider()
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ConfigError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install "
            "it or use --transformer-impl local"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
