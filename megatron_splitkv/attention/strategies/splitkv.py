"""Split-KV: keys and values stay where they are; queries, partial outputs and statistics travel.

Forward, on rank p: cast the queries to the ranks that hold keys which they see; attend the local
context, and the own blocks to themselves; return partial outputs and their log-sum-exps to the
owners of the rows, which merge them.

Backward: the owner of a row holds its whole output, so it computes delta = rowsum(dO * O) and casts
it and the global lse along with dO. With these each rank's backward is local: dk and dv are
complete, dq is partial and goes to its owner as the outputs did.

With the output projection before the return (`attend_partial`) nobody holds a whole output: the
ranks agree on the global lse before they weight their partial outputs, and on delta in backward.

Communication depends on the queries alone, never on the context length.

Shape legend: Q_p query rows of this rank, A query rows that it attends (its own among them), S_p
context rows of this rank, n_q and n_kv heads, d head width. All rows lie as the plan orders them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_splitkv.attention.flight import Flight, return_rows
from megatron_splitkv.attention.kernels import Kernel, select_kernel
from megatron_splitkv.attention.local_attention import LocalAttention
from megatron_splitkv.attention.merge import (
    merge_contributions,
    return_lse,
    row_delta,
    softmax_weight,
)
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.routing import row_exchange
from megatron_splitkv.comm import RowExchange, group_rank, group_size, ranks_on_node
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import AttentionPlan, check_window

# Tensors that move once a layer, as the meter names them.
LAYER_LABELS = frozenset(
    {"q", "hidden", "lse", "lse_total", "out", "grad_out", "lse_and_delta", "delta", "delta_total"}
    | {"grad_q", "grad_hidden"}
)


class SplitKVAttention:
    """One attention of one micro-batch: who attends what, and the differentiable steps.

    All ranks of the group take the same steps in the same order.

    Args:
        plan: the plan of the micro-batch, equal on all ranks.
        cp_group: the context-parallel group; None for one process.
        device: of the tensors.
        kernel: the local attention kernel, selected before anything is launched.
        softmax_scale: factor on the scores.
        window: of a sliding-window layer; None for full attention.
        options: what travels; `gather` and `scatter` are the caller's, who calls the steps.

    Raises:
        ConfigError: the plan is of another group size, or the window hides a query from itself.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        cp_group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        kernel: Kernel,
        softmax_scale: float,
        window: int | None = None,
        options: SplitKVOptions = SplitKVOptions(),
    ) -> None:
        plan.check_cp_size(group_size(cp_group))
        check_window(window)
        self.plan = plan
        self.rank = group_rank(cp_group)
        self.kernel = kernel
        self.softmax_scale = softmax_scale
        self.window = window
        self.options = options
        near = ranks_on_node(cp_group, options.ranks_per_node)
        self.cast = plan.resolve_cast(options.query_cast, window, near)
        self.exchange = row_exchange(
            plan, cp_group, device, self.cast, window, options.ranks_per_node
        )

    def launch(self, rows: torch.Tensor, *, label: str = "q") -> Flight:
        """Send this rank's query rows (or what they will be projected from) off.

        Args:
            rows: of this rank's own blocks.
            label: ``q`` or ``hidden``.

        Returns:
            For `attend` and `attend_partial`; or `land` it for the attended rows.

        Shape:
            ``[Q_p, ...]``; the landed rows ``[A, ...]``.

        Raises:
            ConfigError: not the rows of this rank's blocks.
        """
        if rows.shape[0] != self.exchange.own_rows:
            raise ConfigError(
                f"{label} has {rows.shape[0]} rows, the plan gives rank {self.rank} "
                f"{self.exchange.own_rows}"
            )
        return Flight(
            rows,
            self.exchange,
            label=label,
            wire_dtype=self._wire_dtype(rows),
            keep_own=self.options.save == "own",
        )

    def attend(self, queries: Flight | torch.Tensor, *keys: torch.Tensor | None) -> torch.Tensor:
        """Attention output of this rank's own rows, over the keys of all ranks.

        Args:
            queries: launched queries, or the attended rows where they were projected after landing.
            *keys: context keys and values of this rank, then keys and values of its own blocks'
                rows (None, None where the plan has none).

        Returns:
            The whole output; 0, with gradient 0, for rows that see nothing.

        Shape:
            queries ``[A, n_q, d]``, context ``[S_p, n_kv, d]``, own ``[Q_p, n_kv, d]`` ->
            ``[Q_p, n_q, d]``.
        """
        return self._apply(_Attend, queries, keys)

    def attend_partial(
        self, queries: Flight | torch.Tensor, *keys: torch.Tensor | None
    ) -> torch.Tensor:
        """This rank's share of the output of every row that it attends; the ranks' shares add up.

        For a linear map before the sum; `return_rows` is the sum.

        Shape:
            As `attend`, but the output is ``[A, n_q, d]``.
        """
        return self._apply(_AttendPartial, queries, keys)

    def return_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' shares of every row at its owner.

        Shape:
            ``[A, ...]`` -> ``[Q_p, ...]``.
        """
        return return_rows(
            partial, self.exchange, label="out", wire_dtype=self._wire_dtype(partial)
        )

    def attended(self, all_rows: torch.Tensor) -> torch.Tensor:
        """Of rows that every rank has of all ranks, those that this rank attends.

        Shape:
            ``[P * Q_p, ...]`` -> ``[A, ...]``.
        """
        index = self.exchange.attended_index
        return all_rows if index is None else all_rows.index_select(0, index)

    def _wire_dtype(self, x: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.options.fp32_reduce and x.dtype.itemsize < 4 else x.dtype

    def _apply(
        self,
        node: type[torch.autograd.Function],
        queries: Flight | torch.Tensor,
        keys: tuple[torch.Tensor | None, ...],
    ) -> torch.Tensor:
        flight = queries if isinstance(queries, Flight) else None
        operand, own_rows = queries.take() if isinstance(queries, Flight) else (queries, None)
        call = _Call(
            exchange=self.exchange,
            flight=flight,
            local=LocalAttention(
                kernel=self.kernel,
                context=self.plan.staircase(
                    self.rank, self.kernel.LEAF_LIMITS, window=self.window, cast=self.cast
                ),
                own=self.plan.own_staircase(self.rank, self.window),
                mine=self.exchange.own_attended,
                softmax_scale=self.softmax_scale,
            ),
            wire_dtype=self._wire_dtype(operand),
        )
        out: torch.Tensor = node.apply(operand, own_rows, *keys, call)
        return out


def splitkv_attention(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor | None,
    own_v: torch.Tensor | None,
    plan: AttentionPlan,
    cp_group: dist.ProcessGroup | None,
    *,
    kernel: str = "auto",
    softmax_scale: float,
    window: int | None = None,
    options: SplitKVOptions = SplitKVOptions(),
) -> torch.Tensor:
    """Attention of this rank's query rows to all ranks' keys, from projected tensors.

    Args:
        q: this rank's query rows.
        context_k: keys of this rank's context rows.
        context_v: their values.
        own_k: keys of this rank's own blocks' rows; None where the plan has none.
        own_v: their values.
        plan: the plan of the micro-batch.
        cp_group: the context-parallel group; None for one process.
        kernel: name of the local attention kernel.
        softmax_scale: factor on the scores.
        window: of a sliding-window layer; None for full attention.
        options: how queries travel.

    Returns:
        The whole attention output of this rank's rows; 0, with gradient 0, for padding blocks.

    Shape:
        q ``[Q_p, n_q, d]``, own_k, own_v ``[Q_p, n_kv, d]``, context_k and context_v
        ``[S_p, n_kv, d]`` -> ``[Q_p, n_q, d]``.
    """
    attention = SplitKVAttention(
        plan,
        cp_group,
        q.device,
        kernel=select_kernel(kernel, q, context_k.shape[1]),
        softmax_scale=softmax_scale,
        window=window,
        options=options,
    )
    return attention.attend(attention.launch(q), context_k, context_v, own_k, own_v)


@dataclass(frozen=True)
class _Call:
    """What does not change between forward and backward, and is no tensor of the layer's."""

    exchange: RowExchange
    flight: Flight | None  # None: the attended rows are given as they are
    local: LocalAttention
    wire_dtype: torch.dtype

    def rows(self, operand: torch.Tensor) -> torch.Tensor:
        return operand if self.flight is None else self.flight.wait()

    def grad_of_rows(
        self, partial: torch.Tensor, dtype: torch.dtype, wanted: bool
    ) -> torch.Tensor | None:
        if not wanted:  # then nobody would wait for it
            return None
        return partial.to(dtype) if self.flight is None else self.flight.launch_gradient(partial)


def _kept_queries(
    rows: torch.Tensor, own_rows: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What backward keeps of the queries: all attended rows, or the own ones to cast again."""
    return (rows, None) if own_rows is None else (None, own_rows)


class _Attend(torch.autograd.Function):
    """Partial attention, merged by the owners of the rows."""

    @staticmethod
    def forward(
        ctx: Any, operand: torch.Tensor, own_rows: torch.Tensor | None, *inputs: Any
    ) -> torch.Tensor:
        *keys, call = inputs
        rows = call.rows(operand)
        out, lse = call.local.forward(rows, tuple(keys))
        for level in call.exchange.levels:
            lses = level.launch_return(level.packed(lse), label="lse")
            sent = level.packed(out, call.wire_dtype)
            del out  # before what is received takes its place
            outs = level.launch_return(sent, label="out")
            del sent
            out, lse = merge_contributions(level, outs.wait(), lses.wait())
            del outs
        out = out.to(operand.dtype)
        ctx.call = call
        ctx.save_for_backward(*_kept_queries(rows, own_rows), *keys, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        rows, own_rows, *keys, out, lse = ctx.saved_tensors
        casts = [
            call.exchange.launch_cast(
                torch.stack([lse, row_delta(grad_out, out)]).transpose(0, 1), label="lse_and_delta"
            ),
            call.exchange.launch_cast(grad_out, label="grad_out"),
        ]
        if own_rows is not None:
            casts.append(call.exchange.launch_cast(own_rows, label="q"))
        if own_rows is not None:
            rows = casts.pop().wait()
        grad_out = casts.pop().wait()
        lse, delta = casts.pop().wait().transpose(0, 1).contiguous().unbind()
        grad_rows, *grad_keys = call.local.backward(grad_out, rows, tuple(keys), delta, lse)
        del rows, grad_out  # before what is sent takes their place
        wanted, *_ = ctx.needs_input_grad
        return call.grad_of_rows(grad_rows, out.dtype, wanted), None, *grad_keys, None


class _AttendPartial(torch.autograd.Function):
    """Partial attention, weighted by its share in the whole softmax and left where it is."""

    @staticmethod
    def forward(
        ctx: Any, operand: torch.Tensor, own_rows: torch.Tensor | None, *inputs: Any
    ) -> torch.Tensor:
        *keys, call = inputs
        rows = call.rows(operand)
        partial_out, partial_lse = call.local.forward(rows, tuple(keys))
        own = return_lse(call.exchange, partial_lse)
        lse = call.exchange.launch_cast(own, label="lse_total").wait()
        share = partial_out.mul_(softmax_weight(partial_lse, lse).unsqueeze(-1)).to(operand.dtype)
        ctx.call = call
        ctx.save_for_backward(*_kept_queries(rows, own_rows), *keys, share, lse)
        return share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        rows, own_rows, *keys, share, lse = ctx.saved_tensors
        if own_rows is not None:
            rows = call.exchange.launch_cast(own_rows, label="q").wait()
        delta = call.exchange.total(row_delta(grad_out, share), label="delta")
        grad_rows, *grad_keys = call.local.backward(grad_out, rows, tuple(keys), delta, lse)
        del rows
        wanted, *_ = ctx.needs_input_grad
        return call.grad_of_rows(grad_rows, share.dtype, wanted), None, *grad_keys, None
