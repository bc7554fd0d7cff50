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
from megatron_splitkv.comm.row_exchange import PendingSum, Routes, RowExchange
from megatron_splitkv.comm.topology import NodeTopology, node_topology, split_by_node

__all__ = [
    "Collective",
    "CommMeter",
    "NodeTopology",
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
    "node_topology",
    "split_by_node",
]
