"""Domino's loss: two cross-entropies of the same rows, of the backbone's logits and corrected ones.

Every row has base logits ``hidden @ head^T`` and final logits, which add a low-rank correction
``features @ correction^T`` that knows the tokens before the row's label. Both cross-entropies weigh
in, the base one less and less while the training goes on, so that the backbone learns first to
draft by itself and the correction then what is left.

Unlike the head, the correction's rows are trained, and there are as many as tokens: their gradient
is summed up while the logits of a chunk exist. A chunk's logits are computed once for everything.

Source: sgl-project/SpecForge, `specforge/core/dflash.py` (`OnlineDominoModel`: both losses over the
same weights, ``(1 - lambda) final + lambda base``); NVIDIA/Model-Optimizer's `hf_domino.py` and
NVIDIA-NeMo/Automodel's Domino trainer compute the same.

Shape legend: R rows of this rank, d hidden size, e width of the correction, V_p rows of the
vocabulary on this TP rank, c rows of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_splitkv.comm import all_reduce_sum
from megatron_splitkv.loss.slots import IGNORED_PREDICTION
from megatron_splitkv.loss.vocabulary import (
    argmax_over_vocab,
    cap_slope,
    capped_logits,
    label_columns,
    soft_capped,
    sum_of_row_gradients,
)

# Two fp32 tensors of 256 rows x 250k tokens are 0.5 GB.
DEFAULT_CHUNK_ROWS = 256


class DominoLoss(NamedTuple):
    """What the loss functions return; only `numerator` is differentiable.

    Args:
        numerator: ``(1 - base_weight) final + base_weight base``, complete on every TP rank, local
            to this CP rank; fp32, or fp64 for fp64 input.
        final: weighted sum of the cross-entropies of the corrected logits.
        base: the same of the backbone's logits.
        predictions: token ids by the corrected logits, the lowest of equals;
            `IGNORED_PREDICTION` where the weight is 0.
        base_predictions: the same by the backbone's logits.

    Shape:
        Predictions int64 ``[R]``; all others scalars.
    """

    numerator: torch.Tensor
    final: torch.Tensor
    base: torch.Tensor
    predictions: torch.Tensor
    base_predictions: torch.Tensor


def base_loss_weight(progress: float, decay_ratio: float) -> float:
    """Weight of the backbone's own loss: 1 at the start, 0 from `decay_ratio` of the training on.

    Args:
        progress: share of the training that is done, in [0, 1].
        decay_ratio: share of the training over which the weight falls, linearly.

    Source: SpecForge, `specforge/training/strategies/base.py`, `linear_lambda_base`. It rounds the
        end of the fall down to a whole step.
    """
    return max(0.0, 1.0 - progress / decay_ratio)


def naive_domino_loss(
    hidden: torch.Tensor,
    features: torch.Tensor,
    head_weight: torch.Tensor,
    correction_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    base_weight: float,
    *,
    softcap: float | None = None,
) -> DominoLoss:
    """The twin of `chunked_domino_loss`: all logits at once, autograd, a vocabulary in one piece.

    Args:
        hidden: the backbone's output.
        features: what the correction projects to logits, zero for rows without correction.
        head_weight: the target's whole output head.
        correction_weight: the correction's rows of the whole vocabulary.
        labels: token to predict.
        weights: price of each row; a row of weight 0 is ignored whatever it holds.
        base_weight: weight of the base loss in [0, 1]; the final loss has the rest.
        softcap: c of ``c tanh(logits / c)``, of the base logits; None without.

    Shape:
        ``hidden [R, d]``, ``features [R, e]``, ``head_weight [V, d]``, ``correction_weight
        [V, e]``, ``labels`` and ``weights [R]``.
    """
    priced = weights > 0
    base_logits = soft_capped(hidden[priced] @ head_weight.T, softcap)
    sums, predictions = [], []
    for logits in (base_logits + features[priced] @ correction_weight.T, base_logits):
        losses = F.cross_entropy(logits, labels[priced], reduction="none")
        sums.append((losses * weights[priced]).sum())
        predictions.append(torch.full_like(labels, IGNORED_PREDICTION))
        predictions[-1][priced] = logits.argmax(dim=-1)
    final, base = sums
    numerator = (1.0 - base_weight) * final + base_weight * base
    return DominoLoss(numerator, final.detach(), base.detach(), *predictions)


def chunked_domino_loss(
    hidden: torch.Tensor,
    features: torch.Tensor,
    head_weight: torch.Tensor,
    correction_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    base_weight: float,
    *,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> DominoLoss:
    """Both cross-entropies a few rows at a time, the vocabulary split over TP.

    The gradient of `correction_weight` is summed in fp32 over the chunks, ``[V_p, e]``, and kept
    for the backward pass in the parameter's dtype, as that of ``hidden`` and ``features`` is.

    Args:
        hidden: the backbone's output after its final norm, equal on all TP ranks.
        features: what the correction projects to logits, zero for rows without correction; equal
            on all TP ranks.
        head_weight: this TP rank's rows of the target's frozen head.
        correction_weight: this TP rank's rows of the correction, of the same tokens.
        labels: token to predict (global id); any value where the weight is 0.
        weights: price of each row; rows of weight 0 are never projected, as in
            `chunked_draft_loss`.
        base_weight: weight of the base loss in [0, 1]; the final loss has the rest.
        softcap: c of ``c tanh(logits / c)``, of the base logits; None without.
        tp_group: ranks that share the vocabulary; None for one in one piece.
        vocab_start: global id of the first local row.
        chunk_rows: logits exist for at most that many rows at once, twice.

    Returns:
        The gradients of `numerator`: those of `hidden` and `features` are complete, summed over TP;
        that of `correction_weight` is this TP rank's rows, of this CP rank's draft rows.

    Shape:
        ``hidden [R, d]``, ``features [R, e]``, ``head_weight [V_p, d]``, ``correction_weight
        [V_p, e]``, ``labels`` and ``weights [R]``.
    """
    return DominoLoss(
        *_ChunkedDominoLoss.apply(
            hidden,
            features,
            head_weight,
            correction_weight,
            labels,
            weights,
            base_weight,
            softcap,
            tp_group,
            vocab_start,
            chunk_rows,
        )
    )


class _ChunkedDominoLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        features: torch.Tensor,
        head_weight: torch.Tensor,
        correction_weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        base_weight: float,
        softcap: float | None,
        tp_group: dist.ProcessGroup | None,
        vocab_start: int,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        sums = hidden.new_zeros(2, dtype=dtype)  # final, base
        predictions = labels.new_full((2, labels.numel()), IGNORED_PREDICTION)
        wants_grad = any(ctx.needs_input_grad)
        if wants_grad:
            grad_hidden, grad_features = torch.zeros_like(hidden), torch.zeros_like(features)
            grad_correction = torch.zeros_like(correction_weight, dtype=dtype)

        # One wait of the host for the number of rows; TP ranks hold the same ones.
        for rows in weights.nonzero().squeeze(1).split(chunk_rows):
            price = weights[rows].to(dtype)
            row_features = features[rows]
            base = capped_logits(hidden[rows], head_weight, softcap, dtype)  # [c, V_p]
            slope = cap_slope(base, softcap) if wants_grad else None
            final = base + row_features @ correction_weight.T  # [c, V_p]
            both = (final, base)
            column, is_local = label_columns(labels[rows], vocab_start, head_weight.shape[0])

            tokens, row_max = zip(
                *(argmax_over_vocab(logits, tp_group, vocab_start) for logits in both), strict=True
            )
            predictions[:, rows] = torch.stack(tokens)
            label_logits = torch.stack([logits.gather(1, column)[:, 0] for logits in both])
            label_logits.masked_fill_(~is_local, 0.0)
            # From here on the two tensors hold exponentials, then gradients.
            exponentials = [
                logits.sub_(largest[:, None]).exp_()
                for logits, largest in zip(both, row_max, strict=True)
            ]
            denominators = torch.stack([values.sum(dim=1) for values in exponentials])
            denominators, label_logits = all_reduce_sum(
                torch.stack([denominators, label_logits]), tp_group, label="loss_sums"
            )
            sums += (price * (denominators.log() + torch.stack(row_max) - label_logits)).sum(dim=1)

            if wants_grad:
                shares = (1.0 - base_weight, base_weight)
                grad_final, grad_base = (
                    # d loss / d logits = weight * (softmax - one_hot(label)), local columns only.
                    values.mul_((share * price / denominator)[:, None]).scatter_add_(
                        1, column, -(share * price * is_local)[:, None]
                    )
                    for values, share, denominator in zip(
                        exponentials, shares, denominators, strict=True
                    )
                )
                grad_base.add_(grad_final)  # a final logit has its base logit in it
                if slope is not None:
                    grad_base.mul_(slope)
                grad_hidden[rows] = grad_base.to(hidden.dtype) @ head_weight
                grad_final = grad_final.to(correction_weight.dtype)
                grad_features[rows] = grad_final @ correction_weight
                grad_correction += grad_final.T @ row_features

        ctx.tp_group = tp_group
        if wants_grad:
            ctx.save_for_backward(
                grad_hidden, grad_features, grad_correction.to(correction_weight.dtype)
            )
        final_sum, base_sum = sums
        numerator = (1.0 - base_weight) * final_sum + base_weight * base_sum
        report = (final_sum.clone(), base_sum.clone(), *predictions.unbind())
        ctx.mark_non_differentiable(*report)
        return numerator, *report

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        hidden, features, correction = (g * scale.to(g.dtype) for g in ctx.saved_tensors)
        hidden, features = sum_of_row_gradients((hidden, features), ctx.tp_group)
        return hidden, features, None, correction, *[None] * 7
