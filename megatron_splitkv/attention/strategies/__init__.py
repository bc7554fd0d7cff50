"""Context-parallel strategies: what travels between ranks so that every query meets its keys."""

from megatron_splitkv.attention.strategies.splitkv import splitkv_attention

__all__ = ["splitkv_attention"]
