"""Rows that travel while other work goes on, and whose gradients do: two autograd nodes, not one.

Forward, `launch` sends rows off and `land` waits for them; between the two, other rows are
projected. Backward runs later nodes first: the mirror image of `land` sends the partial gradients
off, the projections in between run theirs, and the mirror image of `launch` waits and adds up. One
node that did both could not overlap with anything.

Gradients of the rows are partial on every rank that attends them. They go back by the same routes
and add up in fp32.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.comm import Pending, PendingSum, RowExchange


class Flight:
    """One cast of rows and, in backward, the return of their partial gradients.

    Args:
        own: the rows that this rank owns.
        exchange: the routes.
        label: name of the rows for the meter; gradients are ``grad_`` and it.
        wire_dtype: dtype in which partial gradients travel.
        keep_own: hand out `own`, without its history, to whoever casts it again in backward.
    """

    def __init__(
        self,
        own: torch.Tensor,
        exchange: RowExchange,
        *,
        label: str,
        wire_dtype: torch.dtype,
        keep_own: bool = False,
    ) -> None:
        self.exchange = exchange
        self.label = label
        self.wire_dtype = wire_dtype
        self.dtype = own.dtype
        self._own = own.detach() if keep_own else None
        self._cast: Pending | None = None
        self._return: PendingSum | None = None
        self._buffer: torch.Tensor | None = _Launch.apply(own, self)

    def land(self) -> torch.Tensor:
        """The attended rows, for autograd to follow.

        Shape:
            ``[A, ...]``.
        """
        rows: torch.Tensor = _Land.apply(self.take()[0], self)
        return rows

    # For autograd nodes that use the rows themselves.

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor that will hold the attended rows, and the own rows if they are kept.

        Given away once: what a node saves it saves through autograd, not here.
        """
        buffer, self._buffer = self._buffer, None
        own, self._own = self._own, None
        assert buffer is not None, "these rows have landed before"
        return buffer, own

    def wait(self) -> torch.Tensor:
        """The attended rows."""
        pending, self._cast = self._cast, None
        assert pending is not None
        return pending.wait()

    def launch_gradient(self, partial: torch.Tensor) -> torch.Tensor:
        """Send partial gradients of the attended rows to their owners.

        Returns:
            What a node returns as the gradient of the taken tensor: nothing reads it.
        """
        self._return = self.exchange.launch_sum(
            partial,
            label=f"grad_{self.label}",
            wire_dtype=self.wire_dtype,
            dtype=accumulator_dtype(self.dtype),
        )
        return partial.new_zeros((), dtype=self.dtype).expand(partial.shape)

    def _launch(self, own: torch.Tensor) -> torch.Tensor:
        self._cast = self.exchange.launch_cast(own, label=self.label)
        return self._cast.result

    def _gradient(self) -> torch.Tensor:
        assert self._return is not None
        total, self._return = self._return.wait(), None
        return total.to(self.dtype)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight._launch(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight._gradient(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.launch_gradient(grad_rows), None


def return_rows(
    partial: torch.Tensor, exchange: RowExchange, *, label: str, wire_dtype: torch.dtype
) -> torch.Tensor:
    """Sum what every rank contributes to its attended rows at the rows' owners; differentiable.

    Args:
        partial: this rank's contributions.
        exchange: the routes.
        label: name of the rows for the meter; the gradient is ``grad_`` and it.
        wire_dtype: dtype in which contributions travel.

    Returns:
        The sums of this rank's own rows, added in fp32, in the dtype of `partial`.

    Shape:
        ``[A, ...]`` -> ``[R, ...]``.
    """
    rows: torch.Tensor = _Return.apply(partial, exchange, label, wire_dtype)
    return rows


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial: torch.Tensor,
        exchange: RowExchange,
        label: str,
        wire_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.exchange, ctx.label = exchange, label
        dtype = accumulator_dtype(partial.dtype)
        pending = exchange.launch_sum(partial, label=label, wire_dtype=wire_dtype, dtype=dtype)
        return pending.wait().to(partial.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        pending = ctx.exchange.launch_cast(grad_rows, label=f"grad_{ctx.label}")
        return pending.wait(), None, None, None
