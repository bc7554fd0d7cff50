"""What rings and turns are made of: shifts, broadcasts, reductions and gathers of uneven shards.

Plain functions, not differentiable, as in `collectives`; for groups of two ranks or more. Every
rank knows every shape beforehand, so no size is ever exchanged, and an empty shard sends nothing.

NCCL makes a group's communicator in its first call, in which every rank of the group must take
part; a rank with empty shards has no message to begin with. So the first shift or uneven gather of
a group comes after one small all-reduce, on every backend; meters do not count it.

Source:
    The documentation of `torch.distributed.batch_isend_irecv`: with NCCL, if it is the first call
    in a group, all ranks of the group must take part in it.
"""

from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_splitkv.comm.collectives import Pending, group_rank, group_size
from megatron_splitkv.comm.meter import mark, record

_READY: WeakSet[dist.ProcessGroup] = WeakSet()


def launch_shift(
    x: torch.Tensor, group: dist.ProcessGroup, *, label: str, received_rows: int
) -> Pending:
    """Begin to send rows to the next rank of the ring and to receive those of the one before.

    Args:
        x: rows for rank + 1; must not change before the wait.
        group: the ring, in rank order.
        label: name of the tensor for the meter.
        received_rows: how many rows come from rank - 1.

    Returns:
        The received rows, always in a buffer of their own.

    Shape:
        ``[rows, ...]`` -> ``[received_rows, ...]``.
    """
    size, rank = group_size(group), group_rank(group)
    sent = x.contiguous()
    received = x.new_empty((received_rows, *x.shape[1:]))
    _make_ready(group, x.device)
    work = _exchange({(rank + 1) % size: sent}, {(rank - 1) % size: received}, group)
    record("shift", label, sent.numel(), x.dtype, size)
    mark("launch", label)
    return Pending(received, label, work, sent)


def launch_gather_uneven(
    x: torch.Tensor, group: dist.ProcessGroup, *, label: str, rows: Sequence[int]
) -> Pending:
    """Begin to concatenate the rows of all ranks, in rank order, however many each has.

    Args:
        x: this rank's rows; must not change before the wait.
        group: the ranks.
        label: name of the tensor for the meter.
        rows: how many each rank has.

    Returns:
        All rows, the same on every rank.

    Shape:
        ``[rows[rank], ...]`` -> ``[sum(rows), ...]``.
    """
    size, rank = group_size(group), group_rank(group)
    sent = x.contiguous()
    gathered = x.new_empty((sum(rows), *x.shape[1:]))
    shards = gathered.split(list(rows))
    shards[rank].copy_(sent)
    others = [other for other in range(size) if other != rank]
    _make_ready(group, x.device)
    work = _exchange(dict.fromkeys(others, sent), {r: shards[r] for r in others}, group)
    record("all_gather_v", label, (size - 1) * sent.numel(), x.dtype, size)
    mark("launch", label)
    return Pending(gathered, label, work, sent)


def launch_broadcast(
    x: torch.Tensor, source: int, group: dist.ProcessGroup, *, label: str
) -> Pending:
    """Begin to bring one rank's tensor to all.

    Args:
        x: the tensor on `source`, anywhere else a contiguous buffer for it.
        source: a rank of the group.
        group: the ranks.
        label: name of the tensor for the meter.
    """
    x = x.contiguous()
    work = None
    if x.numel():
        root = dist.get_global_rank(group, source)
        work = dist.broadcast(x, src=root, group=group, async_op=True)
    record("broadcast", label, x.numel(), x.dtype, group_size(group))
    mark("launch", label)
    return Pending(x, label, work)


def launch_reduce_sum(
    x: torch.Tensor, destination: int, group: dist.ProcessGroup, *, label: str
) -> Pending:
    """Begin to add the tensors of all ranks up at one of them, in their dtype.

    Args:
        x: contiguous; overwritten, on other ranks than `destination` with nothing of use.
        destination: a rank of the group.
        group: the ranks.
        label: name of the tensor for the meter.
    """
    work = None
    if x.numel():
        root = dist.get_global_rank(group, destination)
        work = dist.reduce(x, dst=root, op=dist.ReduceOp.SUM, group=group, async_op=True)
    record("reduce_sum", label, x.numel(), x.dtype, group_size(group))
    mark("launch", label)
    return Pending(x, label, work)


def _make_ready(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks of a group meet once before the first messages between some of them."""
    if group not in _READY:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _READY.add(group)


class _All:
    """Several sends and receives as one work."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _exchange(
    sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor], group: dist.ProcessGroup
) -> _All | None:
    """Point-to-point messages, by rank of the group, launched together."""
    ops = [
        dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group)
        for function, messages in ((dist.isend, sent), (dist.irecv, received))
        for peer, tensor in messages.items()
        if tensor.numel()
    ]
    return _All(dist.batch_isend_irecv(ops)) if ops else None
