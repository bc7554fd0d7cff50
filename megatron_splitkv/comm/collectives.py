"""The four collectives of context-parallel attention, on tensors of equal size on every rank.

Plain functions, not differentiable: the attention that calls them writes its own backward. Each
takes its group and is the identity, without a call, for a group of one rank or None. `label` names
the moved tensor in the meter's report.
"""

import torch
import torch.distributed as dist

from megatron_splitkv.comm.meter import record

# Newer torch calls the same function by another name and warns about the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank within the group; 0 for None."""
    return 0 if group is None else group.rank()


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None, *, label: str) -> torch.Tensor:
    """Concatenate the rows of all ranks, in rank order.

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
        return x
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    _all_gather_single(gathered, x.contiguous(), group=group)
    record("all_gather", label, gathered.numel(), x.dtype, size)
    return gathered


def reduce_scatter_rows(
    partial: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    wire_dtype: torch.dtype,
    label: str,
) -> torch.Tensor:
    """Sum partial rows over ranks; each rank keeps the rows it owns.

    An all-to-all of partials in `wire_dtype` and a local sum in the dtype of `partial`: the bytes
    of a reduce-scatter with one rounding per partial, where a low-precision ring reduction has P.

    Args:
        partial: this rank's contribution to every rank's rows, in the dtype of the sum.
        group: the ranks.
        wire_dtype: dtype in which partials travel.
        label: name of the tensor for the meter.

    Returns:
        The reduced rows of this rank, in the dtype of `partial`; `partial` itself, not rounded, for
        a group of one.

    Shape:
        ``[P * rows, ...]`` -> ``[rows, ...]``.
    """
    size = group_size(group)
    if size == 1:
        return partial
    sent = partial.to(wire_dtype).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    record("all_to_all", label, sent.numel(), wire_dtype, size)
    shards = received.view(size, partial.shape[0] // size, *partial.shape[1:])
    return shards.sum(dim=0, dtype=partial.dtype)


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
