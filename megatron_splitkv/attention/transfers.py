"""Seconds of what a layer moves: volumes of `strategies.volumes` over the links of a machine."""

from collections.abc import Callable

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
        KeyError: an op without a formula.
    """
    sent, calls = move.elements * move.itemsize / move.calls, move.calls
    whole = sent * ranks / (ranks - 1)  # of a buffer of which a rank sends all but its own part
    if move.op == "shift":
        return calls * (links.ring_hop_seconds(sent, ranks) + sent * hop_byte_seconds)
    if move.op == "all_to_all_inside":
        return calls * links.all_to_all_v_seconds(sent, 0.0, links.ranks_in_node(ranks))
    if move.op == "all_to_all_between":
        latency = (links.nodes(ranks) - 1) * links.inter_latency
        return calls * (latency + sent / links.inter_bandwidth)
    if move.op == "all_to_all_v" and far_share is not None:
        near = sent * (1 - far_share)
        return calls * links.all_to_all_v_seconds(near, sent * far_share, ranks)
    return calls * _seconds_of(links)[move.op](whole, ranks)


def _seconds_of(links: Links) -> dict[str, Callable[[float, int], float]]:
    """By op: seconds of a whole buffer over so many ranks."""

    def all_reduce(nbytes: float, ranks: int) -> float:
        return links.all_reduce_seconds(nbytes / 2, ranks)  # the meter counts there and back

    return {
        "all_gather": links.all_gather_seconds,
        "all_gather_v": links.all_to_all_seconds,  # uneven shards are sent to every rank, no ring
        "reduce_scatter": links.reduce_scatter_seconds,
        "all_to_all": links.all_to_all_seconds,
        "all_to_all_v": links.all_to_all_seconds,
        "all_reduce": all_reduce,
        "all_reduce_max": all_reduce,
        "all_reduce_sum": all_reduce,
        "broadcast": links.broadcast_seconds,
        "reduce_sum": links.broadcast_seconds,
    }
