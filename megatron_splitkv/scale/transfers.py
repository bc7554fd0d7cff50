"""Seconds of what a layer moves: volumes of `attention.strategies` over the links of a machine."""

from megatron_splitkv.attention import transfers
from megatron_splitkv.attention.strategies.volumes import Move, Traffic
from megatron_splitkv.comm.links import Links
from megatron_splitkv.scale.work import QueryCast


def move_seconds(
    move: Move, links: Links, ranks: int, hop_byte_seconds: float, cast: QueryCast | None = None
) -> float:
    """`attention.transfers.move_seconds` for the group-casts of a workload.

    Args:
        move: elements that one rank sends, by the meter's convention.
        links: the machine.
        ranks: P.
        hop_byte_seconds: that a rank handles a byte of a point-to-point hop, beside its link.
        cast: how a group-cast's rows divide into those of the own node and of others; the rows of
            other uneven exchanges go to all ranks alike.

    Raises:
        ValueError: an op without a formula.
    """
    far_share = None if cast is None else cast.inter / max(1, cast.intra + cast.inter)
    return transfers.move_seconds(
        move, links, ranks, hop_byte_seconds=hop_byte_seconds, far_share=far_share
    )


def exposed_seconds(traffic: Traffic, times: list[float], hidden: str, behind: float) -> float:
    """Time of a direction when one tensor travels behind a computation.

    Args:
        traffic: the moves.
        times: seconds of each.
        hidden: label of the move that is launched before the computation and awaited after it.
        behind: seconds of that computation.
    """
    labels = [move.label for move in traffic.moves]
    travels = sum(t for label, t in zip(labels, times, strict=True) if label == hidden)
    return sum(times) - min(travels, behind)
