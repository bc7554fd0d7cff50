"""Context-parallel strategies: what travels between ranks so that every query meets its keys."""

from megatron_splitkv.attention.strategies.splitkv import (
    LAYER_LABELS,
    SplitKVAttention,
    splitkv_attention,
)

__all__ = ["LAYER_LABELS", "SplitKVAttention", "splitkv_attention"]
