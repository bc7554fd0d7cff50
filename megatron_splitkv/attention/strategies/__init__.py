"""Context-parallel strategies: what travels between ranks so that every query meets its keys."""

from megatron_splitkv.attention.strategies.peers import PEER_LABELS, peer_attention
from megatron_splitkv.attention.strategies.splitkv import (
    LAYER_LABELS as _SPLITKV_LABELS,
)
from megatron_splitkv.attention.strategies.splitkv import (
    SplitKVAttention,
    splitkv_attention,
)
from megatron_splitkv.attention.strategies.ulysses import check_heads

# Tensors that move once a layer under any strategy, as the meter names them.
LAYER_LABELS = _SPLITKV_LABELS | PEER_LABELS

__all__ = [
    "LAYER_LABELS",
    "SplitKVAttention",
    "check_heads",
    "peer_attention",
    "splitkv_attention",
]
