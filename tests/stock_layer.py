"""A stock Megatron attention layer on one process that believes in two context-parallel ranks."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType


class Group:
    """A process group as far as a layer asks for one while it is built."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def groups() -> ProcessGroupCollection:
    return ProcessGroupCollection(tp=Group(1), cp=Group(2))


def stub(*_: Any, **__: Any) -> torch.nn.Module:
    """Stands for the projections."""
    return torch.nn.Identity()


def submodules(core_attention: Any) -> SelfAttentionSubmodules:
    return SelfAttentionSubmodules(linear_qkv=stub, core_attention=core_attention, linear_proj=stub)


def config(cp_comm_type: str | list[str] = "splitkv") -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        context_parallel_size=2,
        cp_comm_type=cp_comm_type,
    )


def core_attention_of(core_attention: Any, cp_comm_type: str | None = "splitkv") -> torch.nn.Module:
    """What a layer with this spec and type computes attention with."""
    layer = SelfAttention(
        config(),
        submodules(core_attention),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        cp_comm_type=cp_comm_type,
        pg_collection=groups(),
    )
    return layer.core_attention
