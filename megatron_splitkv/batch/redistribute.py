"""Context rows on their way between a source and the plan's owners, for autograd to follow.

For rows that are computed inside the job, in Megatron's order over the context-parallel ranks: an
online target's hidden states, or tokens that Megatron has split. One all-to-all-v of the rows that
change their rank; the gradients' way is the same one back.
"""

from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_splitkv.comm import group_rank, group_size, launch_all_to_all
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.plan.redistribution import Redistribution
from megatron_splitkv.plan.row_source import RowSource


@dataclass(frozen=True, eq=False)
class _Routes:
    """A rank's part with its indices on a device."""

    part: Redistribution
    sent: torch.Tensor
    received: torch.Tensor
    kept_old: torch.Tensor
    kept_new: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, part: Redistribution) -> Self:
        """Bring the indices to the device."""
        indices = (part.sent_index, part.received_index, part.kept_old, part.kept_new)
        return cls(part, *(torch.from_numpy(index).to(device) for index in indices))

    def reverse(self) -> Self:
        """The way back, with the same tensors; also how gradients go."""
        return type(self)(
            self.part.reverse(), self.received, self.sent, self.kept_new, self.kept_old
        )


# Several tensors of a micro-batch, and their gradients, go the same way.
type _Kept = WeakKeyDictionary[RowSource, dict[tuple[int, torch.device], _Routes]]
_ROUTES: WeakKeyDictionary[ContextPlan, _Kept] = WeakKeyDictionary()


def redistribute_rows(
    x: torch.Tensor,
    plan: ContextPlan,
    source: RowSource,
    cp_group: dist.ProcessGroup | None,
    *,
    label: str = "context_rows",
) -> torch.Tensor:
    """Bring context rows from where they are to where the plan wants them ("dispatch").

    Args:
        x: this rank's rows in the source's order; any dtype, strides and trailing dimensions.
        plan: the new owners.
        source: the present ones.
        cp_group: the ranks; None for one process.
        label: name of the rows for the meter; gradients are ``grad_`` and it.

    Returns:
        This rank's rows of the plan, in ascending global order. Differentiable: backward is a
        collective too, so `x` must want gradients on all ranks or on none.

    Shape:
        ``[source.num_rows(rank), ...]`` -> ``[plan.num_rows(rank), ...]``; local.

    Raises:
        ConfigError: plan, source, group and rows do not fit each other; before anything is sent.
    """
    return _move(x, _routes(plan, source, cp_group, x.device), cp_group, label)


def undispatch_rows(
    x: torch.Tensor,
    plan: ContextPlan,
    source: RowSource,
    cp_group: dist.ProcessGroup | None,
    *,
    label: str = "context_rows",
) -> torch.Tensor:
    """Bring context rows back from the plan's owners to where the source has them.

    Args:
        x: this rank's rows of the plan, in ascending global order.
        plan: the present owners.
        source: the new ones.
        cp_group: the ranks; None for one process.
        label: name of the rows for the meter; gradients are ``grad_`` and it.

    Returns:
        This rank's rows in the source's order, zeros where that has padding. Differentiable:
        backward is a collective too, so `x` must want gradients on all ranks or on none.

    Shape:
        ``[plan.num_rows(rank), ...]`` -> ``[source.num_rows(rank), ...]``; local.

    Raises:
        ConfigError: plan, source, group and rows do not fit each other; before anything is sent.
    """
    return _move(x, _routes(plan, source, cp_group, x.device).reverse(), cp_group, label)


def _routes(
    plan: ContextPlan,
    source: RowSource,
    cp_group: dist.ProcessGroup | None,
    device: torch.device,
) -> _Routes:
    plan.check_cp_size(group_size(cp_group))
    kept = _ROUTES.setdefault(plan, WeakKeyDictionary()).setdefault(source, {})
    key = (group_rank(cp_group), device)
    if key not in kept:
        kept[key] = _Routes.on(device, Redistribution.of(plan, source, group_rank(cp_group)))
    return kept[key]


def _move(
    x: torch.Tensor, routes: _Routes, cp_group: dist.ProcessGroup | None, label: str
) -> torch.Tensor:
    if x.dim() == 0 or x.shape[0] != routes.part.num_old:
        raise ConfigError(
            f"{label} have shape {tuple(x.shape)} on this rank; the plan and the row source say "
            f"that its first dimension has {routes.part.num_old} rows"
        )
    moved: torch.Tensor = _Move.apply(x, routes, cp_group, label)
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        routes: _Routes,
        cp_group: dist.ProcessGroup | None,
        label: str,
    ) -> torch.Tensor:
        ctx.routes, ctx.cp_group, ctx.label = routes, cp_group, label
        return _exchange(x, routes, cp_group, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = ctx.routes.reverse()
        return _exchange(grad, back, ctx.cp_group, f"grad_{ctx.label}"), None, None, None


def _exchange(
    x: torch.Tensor, routes: _Routes, cp_group: dist.ProcessGroup | None, label: str
) -> torch.Tensor:
    """Send off what leaves, put what stays in its place meanwhile, then what has come."""
    received = None
    if group_size(cp_group) > 1:  # every rank calls, whether or not it has rows to move
        received = launch_all_to_all(
            x.index_select(0, routes.sent),
            cp_group,
            label=label,
            sent_rows=routes.part.sent_rows.tolist(),
            received_rows=routes.part.received_rows.tolist(),
        )
    shape = (routes.part.num_new, *x.shape[1:])
    moved = x.new_empty(shape) if routes.part.fills else x.new_zeros(shape)
    moved.index_copy_(0, routes.kept_new, x.index_select(0, routes.kept_old))
    if received is not None:
        moved.index_copy_(0, routes.received, received.wait())
    return moved
