"""DSpark's loss: the label's cross-entropy, and the distance to the target's whole distribution.

A row's distribution p is the softmax of ``hidden @ head^T + latent @ markov^T``: the target's
frozen head, and the Markov head's low-rank bias, which knows the token before the row's label. The
target's own distribution q is the softmax of its head applied to its own hidden state. A token
drawn from p is accepted in speculative sampling with probability ``1 - L1(p, q) / 2``: the loss
minimises that distance, and the confidence head learns to foresee the probability.

The Markov head's rows are trained, and there are as many as tokens: their gradient is summed up
while the logits of a chunk exist, like in Domino's loss.

With s = sign(p - q), the gradient of ``L1 = sum |p - q|`` with respect to the logits is
``p * (s - sum(s p))``.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/loss.py` (three weighted means over the same
weights; the accept rate is detached where the confidence head learns it) and
`deepspec/modeling/dspark/gemma4/modeling.py` (both distributions' logits are soft-capped, the bias
is added behind the cap).

Shape legend: R rows of this rank, d hidden size, r rank of the Markov head, V_p rows of the
vocabulary on this TP rank, c rows of a chunk.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_splitkv.comm import all_reduce_max, all_reduce_sum
from megatron_splitkv.loss.slots import IGNORED_PREDICTION
from megatron_splitkv.loss.vocabulary import (
    argmax_over_vocab,
    cap_slope,
    capped_logits,
    label_columns,
    soft_capped,
    sum_of_row_gradients,
)

# Three fp32 tensors of 256 rows x 250k tokens are 0.8 GB.
DEFAULT_CHUNK_ROWS = 256


class DSparkLoss(NamedTuple):
    """What the loss functions return; only `numerator` is differentiable.

    Args:
        numerator: ``ce_weight * cross_entropy + l1_weight * distance``, complete on every TP rank,
            local to this CP rank; fp32, or fp64 for fp64 input.
        cross_entropy: weighted sum of the labels' cross-entropies.
        distance: weighted sum of the L1 distances of the two distributions.
        accept_rate: ``1 - L1 / 2`` of every row; 0 where the weight is 0.
        predictions: token ids, the lowest of equals; `IGNORED_PREDICTION` where the weight is 0.

    Shape:
        accept_rate and predictions ``[R]``; all others scalars.
    """

    numerator: torch.Tensor
    cross_entropy: torch.Tensor
    distance: torch.Tensor
    accept_rate: torch.Tensor
    predictions: torch.Tensor


def leading_slots(label_mask: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of every block before its first that is not supervised: the ones that are trained.

    Args:
        label_mask: supervised slots.
        block_size: B.

    Shape:
        bool ``[R]``, block after block; the result likewise.

    Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/common.py`, `build_eval_mask`.
    """
    return label_mask.view(-1, block_size).long().cumprod(dim=1).bool().view(-1)


def confidence_loss(
    confidence: torch.Tensor, accept_rate: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of the confidence head's binary cross-entropies.

    Args:
        confidence: the head's logits.
        accept_rate: what they should say; no gradient flows there.
        weights: price of each row.

    Shape:
        ``[R]`` each; the result is a scalar of the dtype of `accept_rate`.
    """
    losses = F.binary_cross_entropy_with_logits(
        confidence.to(accept_rate.dtype), accept_rate.detach(), reduction="none"
    )
    return (losses * weights.to(losses.dtype)).sum()


def naive_dspark_loss(
    hidden: torch.Tensor,
    latent: torch.Tensor,
    head_weight: torch.Tensor,
    markov_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher_hidden: torch.Tensor,
    *,
    ce_weight: float,
    l1_weight: float,
    softcap: float | None = None,
) -> DSparkLoss:
    """The twin of `chunked_dspark_loss`: all logits at once, autograd, a vocabulary in one piece.

    Args:
        hidden: the backbone's output.
        latent: what the Markov head projects to logits.
        head_weight: the target's whole output head.
        markov_weight: the Markov head's rows of the whole vocabulary.
        labels: token to predict.
        weights: price of each row; a row of weight 0 is ignored whatever it holds.
        teacher_hidden: what the target's head read when it said the label.
        ce_weight: weight of the cross-entropy.
        l1_weight: weight of the distance.
        softcap: c of ``c tanh(logits / c)``, of the head's logits; None without.

    Shape:
        ``hidden`` and ``teacher_hidden [R, d]``, ``latent [R, r]``, ``head_weight [V, d]``,
        ``markov_weight [V, r]``, ``labels`` and ``weights [R]``.
    """
    priced = weights > 0
    drafted, taught = (
        soft_capped(rows[priced] @ head_weight.T, softcap) for rows in (hidden, teacher_hidden)
    )
    drafted = drafted + latent[priced] @ markov_weight.T
    losses = F.cross_entropy(drafted, labels[priced], reduction="none")
    distances = (drafted.softmax(-1) - taught.softmax(-1)).abs().sum(-1)
    cross_entropy = (losses * weights[priced]).sum()
    distance = (distances * weights[priced]).sum()
    accept_rate = distances.new_zeros(labels.shape)
    accept_rate[priced] = (1 - distances.detach() / 2).clamp(0, 1)
    predictions = torch.full_like(labels, IGNORED_PREDICTION)
    predictions[priced] = drafted.argmax(dim=-1)
    numerator = ce_weight * cross_entropy + l1_weight * distance
    return DSparkLoss(
        numerator, cross_entropy.detach(), distance.detach(), accept_rate, predictions
    )


def chunked_dspark_loss(
    hidden: torch.Tensor,
    latent: torch.Tensor,
    head_weight: torch.Tensor,
    markov_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher_hidden: torch.Tensor,
    *,
    ce_weight: float,
    l1_weight: float,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> DSparkLoss:
    """Both losses a few rows at a time, the vocabulary split over TP.

    The gradient of `markov_weight` is summed in fp32 over the chunks, ``[V_p, r]``, and kept for
    the backward pass in the parameter's dtype, as that of ``hidden`` and ``latent`` is.

    Args:
        hidden: the backbone's output after its final norm, equal on all TP ranks.
        latent: what the Markov head projects to logits, equal on all TP ranks.
        head_weight: this TP rank's rows of the target's frozen head.
        markov_weight: this TP rank's rows of the Markov head, of the same tokens.
        labels: token to predict (global id); any value where the weight is 0.
        weights: price of each row; rows of weight 0 are never projected, and whatever they hold
            reaches neither the loss nor a gradient.
        teacher_hidden: what the target's head read when it said the label.
        ce_weight: weight of the cross-entropy.
        l1_weight: weight of the distance.
        softcap: c of ``c tanh(logits / c)``, of the head's logits; None without.
        tp_group: ranks that share the vocabulary; None for one in one piece.
        vocab_start: global id of the first local row.
        chunk_rows: logits exist for at most that many rows at once.

    Returns:
        The gradients of `numerator`: those of `hidden` and `latent` are complete, summed over TP;
        that of `markov_weight` is this TP rank's rows, of this CP rank's draft rows.

    Shape:
        ``hidden`` and ``teacher_hidden [R, d]``, ``latent [R, r]``, ``head_weight [V_p, d]``,
        ``markov_weight [V_p, r]``, ``labels`` and ``weights [R]``.
    """
    options = _Options(ce_weight, l1_weight, softcap, tp_group, vocab_start, chunk_rows)
    return DSparkLoss(
        *_ChunkedDSparkLoss.apply(
            hidden, latent, head_weight, markov_weight, labels, weights, teacher_hidden, options
        )
    )


@dataclass(frozen=True)
class _Options:
    ce_weight: float
    l1_weight: float
    softcap: float | None
    tp_group: dist.ProcessGroup | None
    vocab_start: int
    chunk_rows: int


class _ChunkedDSparkLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        latent: torch.Tensor,
        head_weight: torch.Tensor,
        markov_weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        teacher_hidden: torch.Tensor,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tp_group, softcap = options.tp_group, options.softcap
        sums = hidden.new_zeros(2, dtype=dtype)  # cross-entropy, distance
        accept_rate = hidden.new_zeros(labels.shape, dtype=dtype)
        predictions = torch.full_like(labels, IGNORED_PREDICTION)
        wants_grad = any(ctx.needs_input_grad)
        if wants_grad:
            grad_hidden, grad_latent = torch.zeros_like(hidden), torch.zeros_like(latent)
            grad_markov = torch.zeros_like(markov_weight, dtype=dtype)

        # One wait of the host for the number of rows; TP ranks hold the same ones.
        for rows in weights.nonzero().squeeze(1).split(options.chunk_rows):
            price, row_latent = weights[rows].to(dtype), latent[rows]
            logits = capped_logits(hidden[rows], head_weight, softcap, dtype)  # [c, V_p]
            slope = cap_slope(logits, softcap) if wants_grad else None
            logits += row_latent @ markov_weight.T
            predictions[rows], row_max = argmax_over_vocab(logits, tp_group, options.vocab_start)
            column, is_local = label_columns(
                labels[rows], options.vocab_start, head_weight.shape[0]
            )
            label_logit = logits.gather(1, column).squeeze(1).masked_fill(~is_local, 0.0)

            taught = capped_logits(
                teacher_hidden[rows].to(hidden.dtype), head_weight, softcap, dtype
            )
            taught_max = all_reduce_max(taught.amax(dim=1), tp_group, label="teacher_max")
            p, q = logits.sub_(row_max[:, None]).exp_(), taught.sub_(taught_max[:, None]).exp_()
            p_sum, q_sum, label_logit = all_reduce_sum(
                torch.stack([p.sum(dim=1), q.sum(dim=1), label_logit]), tp_group, label="loss_sums"
            )
            p /= p_sum[:, None]
            difference = q.div_(q_sum[:, None]).neg_().add_(p)
            local_distance = torch.linalg.vector_norm(difference, ord=1, dim=1)
            sign = difference.sign_()
            distance, signed = all_reduce_sum(
                torch.stack([local_distance, torch.einsum("cv,cv->c", sign, p)]),
                tp_group,
                label="loss_distances",
            )
            accept_rate[rows] = (1 - distance / 2).clamp_(0, 1)
            cross_entropy = p_sum.log() + row_max - label_logit
            sums += torch.stack([(price * cross_entropy).sum(), (price * distance).sum()])

            if wants_grad:
                # p (ce + l1 (sign - signed)) - ce at the label, local columns only.
                ce, l1 = options.ce_weight * price, options.l1_weight * price
                grad = sign.mul_(l1[:, None]).add_((ce - l1 * signed)[:, None]).mul_(p)
                grad.scatter_add_(1, column, -(ce * is_local)[:, None])
                of_bias = grad.to(markov_weight.dtype)
                grad_latent[rows] = of_bias @ markov_weight
                grad_markov += of_bias.T @ row_latent
                of_head = grad if slope is None else grad.mul_(slope)
                grad_hidden[rows] = of_head.to(hidden.dtype) @ head_weight

        ctx.tp_group = tp_group
        ctx.save_for_backward(
            *((grad_hidden, grad_latent, grad_markov.to(markov_weight.dtype)) if wants_grad else ())
        )
        cross_entropy, distance = sums
        numerator = options.ce_weight * cross_entropy + options.l1_weight * distance
        others = (cross_entropy.clone(), distance.clone(), accept_rate, predictions)
        ctx.mark_non_differentiable(*others)
        return numerator, *others

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        hidden, latent, markov = (g * scale.to(g.dtype) for g in ctx.saved_tensors)
        hidden, latent = sum_of_row_gradients((hidden, latent), ctx.tp_group)
        return hidden, latent, None, markov, *[None] * 4
