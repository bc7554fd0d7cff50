"""The split: what one context-parallel rank reads or receives, and trains on."""

from megatron_splitkv.batch.context_batch import (
    get_batch_on_this_cp_rank,
    get_online_batch_on_this_cp_rank,
)
from megatron_splitkv.batch.megatron_batch import pack_from_megatron, row_source_from_megatron
from megatron_splitkv.batch.prefetch import Prefetch
from megatron_splitkv.batch.redistribute import redistribute_rows, undispatch_rows

__all__ = [
    "Prefetch",
    "get_batch_on_this_cp_rank",
    "get_online_batch_on_this_cp_rank",
    "pack_from_megatron",
    "redistribute_rows",
    "row_source_from_megatron",
    "undispatch_rows",
]
