"""Which ranks of a group share a node, and the groups in which two-level returns travel.

The ranks of a node share its network cards, and talk to each other over faster links. What several
of them send to one rank of another node can be added up on this side of the cards.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class NodeTopology:
    """A group of ranks on n nodes, g on each, seen by one of them.

    Args:
        node_group: the g ranks of this rank's node, in the order of the whole group.
        peer_group: the n ranks that have this rank's place on their nodes, in the order of nodes.
    """

    node_group: dist.ProcessGroup
    peer_group: dist.ProcessGroup


# Without a reference to the whole group: it may end, and Megatron's do.
_TOPOLOGIES: WeakKeyDictionary[dist.ProcessGroup, dict[int, NodeTopology | None]] = (
    WeakKeyDictionary()
)


def node_topology(
    group: dist.ProcessGroup | None, ranks_per_node: int | None = None
) -> NodeTopology | None:
    """The two levels of a group; its process groups are made once, by the first call.

    That call is a collective of the group: all of its ranks make it at the same point of their
    program, other ranks need not.

    Args:
        group: the ranks.
        ranks_per_node: processes of the job on each node, which are numbered node by node; None: as
            the launcher says.

    Returns:
        None where one level is all there is: a single node, one rank a node, nodes with unequally
        many ranks of the group, an unknown number of ranks a node, or a default group that is bound
        to a device, for its parts can only be made by all ranks of the job together.
    """
    per_node = launched_ranks_per_node() if ranks_per_node is None else ranks_per_node
    if group is None or per_node is None or per_node == 1:
        return None
    kept = _TOPOLOGIES.setdefault(group, {})
    if per_node not in kept:
        kept[per_node] = _build(group, per_node)
    return kept[per_node]


def launched_ranks_per_node() -> int | None:
    """Ranks on each node by torchrun's environment; None if unknown or not the same everywhere."""
    local, world, nodes = (
        int(os.environ.get(name, 0))
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    # Nodes of other sizes come to the same end: not all products can be right.
    even = local * nodes == world if nodes else local > 0 and world % local == 0
    return local if local and even else None


def split_by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]] | None:
    """Ranks of a group, node by node.

    Args:
        ranks: numbers in the job, in the order of the group.
        ranks_per_node: processes of the job on each node.

    Returns:
        None unless several nodes hold equally many of them, more than one, and each a run of them.
    """
    nodes = [list(run) for _, run in groupby(ranks, lambda rank: rank // ranks_per_node)]
    names = {rank // ranks_per_node for rank in ranks}
    (size, *others) = {len(node) for node in nodes}
    if others or size == 1 or len(nodes) == 1 or len(nodes) > len(names):
        return None
    return nodes


def _build(group: dist.ProcessGroup, ranks_per_node: int) -> NodeTopology | None:
    nodes = split_by_node(dist.get_process_group_ranks(group), ranks_per_node)
    world = dist.group.WORLD
    if nodes is None or (world is not None and world.bound_device_id is not None):
        return None
    rank, backend = dist.get_rank(), dist.get_backend(group)

    def part(parts: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup:
        mine = next(list(part) for part in parts if rank in part)
        made: dist.ProcessGroup = dist.new_group(
            mine, backend=backend, use_local_synchronization=True, group_desc=name
        )
        return made

    places = list(zip(*nodes, strict=True))
    return NodeTopology(part(nodes, "SPLITKV_NODE"), part(places, "SPLITKV_PEERS"))
