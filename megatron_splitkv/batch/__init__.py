"""The split: what one context-parallel rank reads and trains on."""

from megatron_splitkv.batch.context_batch import get_batch_on_this_cp_rank

__all__ = ["get_batch_on_this_cp_rank"]
