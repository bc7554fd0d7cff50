"""Seconds of what a layer moves: volumes of `strategies.volumes` over the links of a machine."""

from dataclasses import replace

from megatron_splitkv.attention.strategies.volumes import Move
from megatron_splitkv.comm.links import Links


def node_ranks(links: Links, ranks: int) -> int:
    """Ranks on each node where split-KV's returns take two levels; 1 where they take one.

    Args:
        links: the machine, whose nodes are filled one after the other.
        ranks: P.
    """
    per_node = links.ranks_per_node
    return per_node if ranks > per_node and ranks % per_node == 0 else 1


def links_with_nodes(links: Links, node_ranks: int | None) -> Links:
    """The machine with as many ranks a node as the run has; its nodes' cards stay.

    Args:
        links: a preset, or measured in another launch.
        node_ranks: ranks of the group on each of several nodes; None or 1 say nothing of that kind.
    """
    if node_ranks is None or node_ranks in (1, links.ranks_per_node):
        return links
    return replace(links, ranks_per_node=node_ranks)


def move_seconds(
    move: Move,
    links: Links,
    ranks: int,
    *,
    hop_byte_seconds: float = 0.0,
    far_share: float | None = None,
) -> float:
    """Time of one tensor's journey, all its calls together, nothing hidden.

    Args:
        move: elements that one rank sends, by the meter's convention.
        links: the machine.
        ranks: P.
        hop_byte_seconds: that a rank handles a byte of a point-to-point hop, beside its link.
        far_share: of an uneven all-to-all, the share of its bytes that leaves the node; None if
            the bytes go to all ranks alike.

    Raises:
        ValueError: an op without a formula.
    """
    sent, calls = move.elements * move.itemsize / move.calls, move.calls
    if move.op == "shift":
        return calls * (links.ring_hop_seconds(sent, ranks) + sent * hop_byte_seconds)
    if move.op == "all_to_all_v" and far_share is not None:
        near = sent * (1 - far_share)
        return calls * links.all_to_all_v_seconds(near, sent * far_share, ranks)
    return calls * links.collective_seconds(move.op, sent, ranks)
