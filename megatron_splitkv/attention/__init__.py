"""Context-parallel attention of draft blocks: `context_parallel_attention` and its parts.

The classes that plug into Megatron are imported when they are asked for, so that the attention
itself needs nothing but torch.
"""

from typing import TYPE_CHECKING, Any

from megatron_splitkv.attention.api import (
    context_parallel_attention,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.options import SplitKVOptions

if TYPE_CHECKING:
    from megatron_splitkv.attention.core_attention import SplitKVCoreAttention
    from megatron_splitkv.attention.packed_seq_params import SplitKVPackedSeqParams

__all__ = [
    "SplitKVCoreAttention",
    "SplitKVOptions",
    "SplitKVPackedSeqParams",
    "context_parallel_attention",
    "split_context_parallel_attention",
]


def __getattr__(name: str) -> Any:
    if name == "SplitKVCoreAttention":
        from megatron_splitkv.attention.core_attention import SplitKVCoreAttention

        return SplitKVCoreAttention
    if name == "SplitKVPackedSeqParams":
        from megatron_splitkv.attention.packed_seq_params import SplitKVPackedSeqParams

        return SplitKVPackedSeqParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
