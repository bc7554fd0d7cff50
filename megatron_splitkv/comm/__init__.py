"""Collectives over an explicit group, and a meter that counts what they move."""

from megatron_splitkv.comm.collectives import (
    all_reduce_max,
    all_reduce_sum,
    gather_rows,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from megatron_splitkv.comm.meter import Collective, CommMeter

__all__ = [
    "Collective",
    "CommMeter",
    "all_reduce_max",
    "all_reduce_sum",
    "gather_rows",
    "group_rank",
    "group_size",
    "reduce_scatter_rows",
]
