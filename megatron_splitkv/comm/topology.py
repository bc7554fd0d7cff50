"""Which ranks of a group share a node.

The ranks of a node share its network cards, and talk to each other over faster links. What several
of them send to one rank of another node can be added up on this side of the cards.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch.distributed as dist

from megatron_splitkv.comm.links import Links


def ranks_on_node(group: dist.ProcessGroup | None, ranks_per_node: int | None = None) -> int:
    """How many neighbours of a group share a node, on each of several nodes.

    Reads the environment and what the group knows of itself, never another rank.

    Args:
        group: the ranks.
        ranks_per_node: processes of the job on each node, which are numbered node by node; None: as
            the launcher says.

    Returns:
        1 where there is one level only; see `split_by_node`.
    """
    per_node = launched_ranks_per_node() if ranks_per_node is None else ranks_per_node
    if group is None or per_node == 1:
        return 1
    return split_by_node(dist.get_process_group_ranks(group), per_node)


def launched_ranks_per_node() -> int:
    """Ranks on each node by torchrun's environment; 1 if unknown or not the same everywhere."""
    return _launched() or 1


def links_of_launch(links: Links, ranks_per_node: int | None = None) -> Links:
    """The machine with the job's ranks on its nodes: where a row goes is the same for all.

    Args:
        links: a preset, or measured in another launch; its nodes keep their cards.
        ranks_per_node: as in `ranks_on_node`; 1 turns a level off and says nothing about nodes.

    Returns:
        `links` itself where nobody says how many ranks a node has.
    """
    per_node = _launched() if ranks_per_node in (None, 1) else ranks_per_node
    return links if per_node is None else replace(links, ranks_per_node=per_node)


def _launched() -> int | None:
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    local, world, nodes = (int(os.environ.get(name, 0)) for name in names)
    if not 0 < local <= world:
        return None
    # Nodes of unequal sizes must come to one end: none of them finds this, but one of mean size.
    even = local * nodes == world if nodes else world % local == 0
    return local if even else None


def split_by_node(ranks: Sequence[int], ranks_per_node: int) -> int:
    """How many ranks of a group each node holds, if all is even.

    Args:
        ranks: numbers in the job, in the order of the group.
        ranks_per_node: processes of the job on each node.

    Returns:
        1 unless several nodes hold equally many of them, more than one, and each a run of them.
    """
    runs = [(node, len(list(run))) for node, run in groupby(ranks, lambda r: r // ranks_per_node)]
    sizes, nodes = {size for _, size in runs}, {node for node, _ in runs}
    even = len(sizes) == 1 and len(nodes) == len(runs) > 1
    return sizes.pop() if even else 1
