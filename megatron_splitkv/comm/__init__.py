"""Collectives over an explicit group, and a meter that counts what they move."""

from megatron_splitkv.comm.collectives import (
    Pending,
    all_reduce_max,
    all_reduce_sum,
    group_rank,
    group_size,
    launch_all_to_all,
    launch_gather_rows,
)
from megatron_splitkv.comm.hops import (
    launch_broadcast,
    launch_gather_uneven,
    launch_reduce_sum,
    launch_shift,
)
from megatron_splitkv.comm.meter import Collective, CommMeter, mark
from megatron_splitkv.comm.pending_sum import PendingSum
from megatron_splitkv.comm.row_exchange import Routes, RowExchange
from megatron_splitkv.comm.topology import ranks_on_node

__all__ = [
    "Collective",
    "CommMeter",
    "Pending",
    "PendingSum",
    "Routes",
    "RowExchange",
    "all_reduce_max",
    "all_reduce_sum",
    "group_rank",
    "group_size",
    "launch_all_to_all",
    "launch_broadcast",
    "launch_gather_rows",
    "launch_gather_uneven",
    "launch_reduce_sum",
    "launch_shift",
    "mark",
    "ranks_on_node",
]
