"""Algebra of partial attention: merge by log-sum-exp, weights, delta and its carrier.

Partial attention over a set of keys is a pair (out, lse): the softmax-weighted values and the
natural logarithm of the softmax denominator. A row that sees none of the keys has out 0 and lse
-inf, and nothing here turns that into NaN.

Shape legend: R rows, h heads, d head width; out ``[R, h, d]``, lse ``[R, h]``.
"""

import torch

from megatron_splitkv.comm import RowExchange

# Elements of dO that are copied to the accumulator dtype at once.
PART_ELEMENTS = 1 << 22


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results add up: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite_or_zero(lse: torch.Tensor) -> torch.Tensor:
    """`lse` with 0 in place of -inf, to subtract from scores or partial lse that are -inf too.

    exp(-inf - 0) is the 0 that is wanted, where exp(-inf - (-inf)) is NaN.
    """
    return lse.masked_fill(lse == -torch.inf, 0.0)


def softmax_weight(partial_lse: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Share exp(partial_lse - lse) of a partial softmax in the whole; 0 where it saw nothing.

    Args:
        partial_lse: lse over some keys.
        lse: lse over all keys, at least `partial_lse`.
    """
    return torch.exp(partial_lse - finite_or_zero(lse))


def merge_(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merge a second partial result over other keys into `out` and `lse`, in place.

    Args:
        out: partial output in the accumulator dtype, may be a view.
        lse: its log-sum-exp.
        other_out: the second partial output, any dtype.
        other_lse: its log-sum-exp.
    """
    merged = torch.logaddexp(lse, other_lse)
    out.mul_(softmax_weight(lse, merged).unsqueeze(-1))
    # Mixed dtypes: the other output is not copied to the accumulator dtype.
    out.addcmul_(other_out, softmax_weight(other_lse, merged).unsqueeze(-1))
    lse.copy_(merged)


def row_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """delta = sum over the head width of dO * O, in the accumulator dtype.

    The softmax backward needs it for the whole output, not for a rank's part of it. Made in parts
    of the rows, as the carrier is.

    Shape:
        ``[R, h, d]``, ``[R, h, d]`` -> ``[R, h]``.
    """
    dtype = accumulator_dtype(grad_out.dtype)
    rows = _rows_at_once(grad_out)
    parts = zip(grad_out.split(rows), out.split(rows), strict=True)
    return torch.cat([(a.to(dtype) * b.to(dtype)).sum(dim=-1) for a, b in parts])


def delta_carrier(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An output O' with rowsum(dO * O') = delta, for kernels that compute delta themselves.

    O' = dO * delta / |dO|^2 per row and head, 0 where dO = 0. The shortest such vector, so it is no
    longer than the true output. dO is divided by its 1-norm before it is squared: |dO|^2 leaves
    fp32's range long before dO does. Made in parts of the rows, for several accumulator copies of
    dO would be the most memory that a backward needs.

    Args:
        grad_out: dO.
        delta: rowsum(dO * O) in the accumulator dtype.

    Returns:
        O' in the dtype of `grad_out`.

    Shape:
        ``[R, h, d]``, ``[R, h]`` -> ``[R, h, d]``.
    """
    carrier = grad_out.new_empty(grad_out.shape)
    rows = _rows_at_once(grad_out)
    parts = zip(carrier.split(rows), grad_out.split(rows), delta.split(rows), strict=True)
    for part, part_grad_out, part_delta in parts:
        part.copy_(_carrier_rows(part_grad_out, part_delta))
    return carrier


def _rows_at_once(x: torch.Tensor) -> int:
    return max(1, PART_ELEMENTS // max(1, x[:1].numel()))


def _carrier_rows(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    rows = grad_out.to(delta.dtype)
    length = rows.abs().sum(dim=-1, keepdim=True)  # the maximum would do, but takes far longer
    length = length.masked_fill(length == 0, 1.0)
    unit = rows / length
    # |dO|^2 = length^2 * |unit|^2, and |unit|^2 is between 1 / d and 1, or 0 with dO.
    square = unit.square().sum(dim=-1, keepdim=True)
    factor = delta.unsqueeze(-1) / (length * square.masked_fill(square == 0, 1.0))
    return unit * factor


def merge_contributions(
    exchange: RowExchange, outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a rank's own rows from what the ranks of an exchange computed for them.

    Args:
        exchange: by whose routes the contributions came; one level of a two-level exchange.
        outs: partial outputs, in any dtype.
        lses: their log-sum-exps.

    Returns:
        Output and lse over these ranks' keys, in the dtype of `lses`.

    Shape:
        C contributions to R own rows: ``[C, h, d]``, ``[C, h]`` -> ``[R, h, d]``, ``[R, h]``.
    """
    lse = own_lse(exchange, lses)
    out = lses.new_zeros((exchange.own_rows, *outs.shape[1:]))
    parts = zip(exchange.parts(outs), exchange.parts(lses), strict=True)
    for (rows, part), (_, part_lse) in parts:
        if rows is None:
            weight = softmax_weight(part_lse, lse)
            out.addcmul_(part, weight.unsqueeze(-1))
        else:
            weight = softmax_weight(part_lse, lse.index_select(0, rows))
            out.index_add_(0, rows, part * weight.unsqueeze(-1))
    return out, lse


def return_lse(exchange: RowExchange, lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over all ranks' keys for a rank's own rows, from each rank's partial ones.

    Shape:
        ``[A, h]`` -> ``[R, h]``.
    """
    for level in exchange.levels:
        lse = own_lse(level, level.launch_return(level.packed(lse), label="lse").wait())
    return lse


def own_lse(exchange: RowExchange, lses: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over these ranks' keys for a rank's own rows; -inf where no rank saw any.

    Shape:
        ``[C, h]`` -> ``[R, h]``.
    """
    parts = list(exchange.parts(lses))
    table = lses.new_full((len(parts), exchange.own_rows, *lses.shape[1:]), -torch.inf)
    for row, (rows, part) in zip(table, parts, strict=True):
        if rows is None:
            row.copy_(part)
        else:
            row.index_copy_(0, rows, part)
    # logsumexp of -inf alone is -inf, without a detour over NaN.
    return torch.logsumexp(table, dim=0)
