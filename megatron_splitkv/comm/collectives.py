"""Collectives over an explicit group: those of attention in two steps, and all-reduces.

Plain functions, not differentiable: the attention that calls them writes its own backward. Each
takes its group and is the identity, without a call, for a group of one rank or None. `label` names
the moved tensor in the meter's report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_splitkv.comm.meter import mark, record

# Newer torch calls the same function by another name and warns about the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank within the group; 0 for None."""
    return 0 if group is None else group.rank()


class Work(Protocol):
    """What a launched communication is waited for by: `dist.Work`, or several of them."""

    def wait(self) -> object:
        """Block the host, or on a GPU the current stream, until it is done."""
        ...


@dataclass
class Pending:
    """A launched collective.

    Args:
        result: what `wait` returns; its content is not there before.
        label: which tensor.
        work: the communication, None where there is none.
        sent: kept alive until it has been sent.
    """

    result: torch.Tensor
    label: str
    work: Work | None = None
    sent: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The result; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            mark("wait", self.label)
            self.work = self.sent = None
        return self.result


def launch_gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None, *, label: str) -> Pending:
    """Begin to concatenate the rows of all ranks, in rank order.

    Args:
        x: this rank's rows; the same number on every rank.
        group: the ranks.
        label: name of the tensor for the meter.

    Returns:
        All rows, the same on every rank; `x` itself for a group of one.

    Shape:
        ``[rows, ...]`` -> ``[P * rows, ...]``.
    """
    size = group_size(group)
    if size == 1:
        return Pending(x, label)
    sent = x.contiguous()
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    work = _all_gather_single(gathered, sent, group=group, async_op=True)
    record("all_gather", label, gathered.numel(), x.dtype, size)
    mark("launch", label)
    return Pending(gathered, label, work, sent)


def launch_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    label: str,
    sent_rows: Sequence[int] | None = None,
    received_rows: Sequence[int] | None = None,
    op: str = "all_to_all_v",
) -> Pending:
    """Begin to send each rank its part of the rows.

    Args:
        x: rows for rank 0, then for rank 1, and so on.
        group: the ranks.
        label: name of the tensor for the meter.
        sent_rows: how many of `x` each rank gets; equal parts if None.
        received_rows: how many rows come from each rank; None with `sent_rows`.
        op: what the meter calls it, if parts are given: it may be one level of a machine.

    Returns:
        What the ranks sent here, in rank order; `x` itself for a group of one.

    Shape:
        ``[sum(sent_rows), ...]`` -> ``[sum(received_rows), ...]``.
    """
    size, rank = group_size(group), group_rank(group)
    if size == 1:
        return Pending(x, label)
    sent = x.contiguous()
    if sent_rows is None or received_rows is None:
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        record("all_to_all", label, sent.numel(), x.dtype, size)
    else:
        received = x.new_empty((sum(received_rows), *x.shape[1:]))
        work = dist.all_to_all_single(
            received, sent, list(received_rows), list(sent_rows), group=group, async_op=True
        )
        to_others = sum(sent_rows) - sent_rows[rank]
        record(op, label, to_others * x[:1].numel(), x.dtype, size)
    mark("launch", label)
    return Pending(received, label, work, sent)


def all_reduce_max(x: torch.Tensor, group: dist.ProcessGroup | None, *, label: str) -> torch.Tensor:
    """Elementwise maximum over ranks, as a new tensor; `x` itself for a group of one."""
    return _all_reduce(x, group, dist.ReduceOp.MAX, "all_reduce_max", label)


def all_reduce_sum(x: torch.Tensor, group: dist.ProcessGroup | None, *, label: str) -> torch.Tensor:
    """Elementwise sum over ranks, as a new tensor; `x` itself for a group of one."""
    return _all_reduce(x, group, dist.ReduceOp.SUM, "all_reduce_sum", label)


def _all_reduce(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    reduce_op: dist.ReduceOp.RedOpType,
    op: str,
    label: str,
) -> torch.Tensor:
    size = group_size(group)
    if size == 1:
        return x
    reduced = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=reduce_op, group=group)
    record(op, label, reduced.numel(), reduced.dtype, size)
    return reduced
