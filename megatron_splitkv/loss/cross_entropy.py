"""Cross-entropy over a frozen output head, a few rows at a time, the vocabulary split over TP.

The logits of all draft rows (``rows x V``) would be by far the largest tensor of a step. The head
is frozen, so a row's gradient needs nothing but that row's logits: loss and gradient are taken
chunk by chunk while the logits exist, and only the gradient (``rows x d``) is kept.

Shape legend: R rows of this rank, d hidden size, V_p rows of the head on this TP rank, c rows of a
chunk.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_max, all_reduce_sum
from megatron_splitkv.loss.slots import IGNORED_PREDICTION

# 512 rows x 250k tokens are 0.5 GB in fp32, and enough rows to keep a matmul busy.
DEFAULT_CHUNK_ROWS = 512


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the cross-entropies of this rank's rows, and the predicted tokens.

    Rows of weight 0 are never projected: they cost nothing, and whatever they hold (padding,
    garbage, NaN) reaches neither the loss nor a gradient.

    Args:
        hidden: drafter output after the final norm, equal on all TP ranks.
        head_weight: this TP rank's rows of the frozen output head. Ranks may hold different
            numbers of rows; no padding of the vocabulary is needed.
        labels: token to predict (global id); any value where the weight is 0.
        weights: price of each row.
        tp_group: ranks that share the vocabulary; None for a head in one piece.
        vocab_start: global id of the first local row of the head.
        chunk_rows: logits exist for at most that many rows at once.

    Returns:
        numerator: ``sum(weight * cross-entropy)``, fp32 (fp64 for fp64 input), complete on every TP
            rank, local to this CP rank; its gradient with respect to `hidden` is complete as well.
        predictions: global token ids, the lowest of equals; `IGNORED_PREDICTION` where the weight
            is 0.

    Shape:
        ``hidden [R, d]``, ``head_weight [V_p, d]``, ``labels``, ``weights``, predictions ``[R]``.
    """
    return _ChunkedCrossEntropy.apply(
        hidden, head_weight, labels, weights, tp_group, vocab_start, chunk_rows
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        tp_group: dist.ProcessGroup | None,
        vocab_start: int,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        numerator = hidden.new_zeros((), dtype=dtype)
        predictions = torch.full_like(labels, IGNORED_PREDICTION)
        wants_grad = ctx.needs_input_grad[0]
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None

        # One wait of the host for the number of rows, against projecting padding and slots 0.
        # TP ranks hold the same rows, so they go through the same chunks and collectives.
        for rows in weights.nonzero().squeeze(1).split(chunk_rows):
            price = weights[rows].to(dtype)
            logits = (hidden[rows] @ head_weight.T).to(dtype)  # [c, V_p]
            predictions[rows], row_max = _argmax_over_vocab(logits, tp_group, vocab_start)

            local_label = labels[rows] - vocab_start
            is_local = (local_label >= 0) & (local_label < head_weight.shape[0])
            column = local_label.clamp(0, head_weight.shape[0] - 1)[:, None]
            label_logit = logits.gather(1, column).squeeze(1).masked_fill(~is_local, 0.0)

            exponentials = logits.sub_(row_max[:, None]).exp_()
            sums = torch.stack([exponentials.sum(dim=1), label_logit])
            denominator, label_logit = all_reduce_sum(sums, tp_group, label="loss_sums")
            numerator += (price * (denominator.log() + row_max - label_logit)).sum()

            if grad_hidden is not None:
                # d loss / d logits = weight * (softmax - one_hot(label)), local columns only.
                grad_logits = exponentials.mul_((price / denominator)[:, None])
                grad_logits.scatter_add_(1, column, -(price * is_local)[:, None])
                grad_hidden[rows] = grad_logits.to(hidden.dtype) @ head_weight

        ctx.tp_group = tp_group
        ctx.save_for_backward(*(() if grad_hidden is None else (grad_hidden,)))
        ctx.mark_non_differentiable(predictions)
        return numerator, predictions

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        grad_hidden = grad_hidden * grad_outputs[0].to(grad_hidden.dtype)
        # Each TP rank saw the columns of its own tokens: the gradient is the sum over them.
        return all_reduce_sum(grad_hidden, ctx.tp_group, label="loss_dgrad"), *[None] * 6


def _argmax_over_vocab(
    logits: torch.Tensor, tp_group: dist.ProcessGroup | None, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global id of each row's largest logit, and that logit, over all TP ranks."""
    local_max, token = logits.max(dim=1)
    row_max = all_reduce_max(local_max, tp_group, label="loss_max")
    # Ranks that hold no largest logit stand back; the lowest id of those that do wins.
    not_candidate = torch.iinfo(token.dtype).max
    candidate = torch.where(local_max == row_max, token + vocab_start, not_candidate)
    return -all_reduce_max(-candidate, tp_group, label="predictions"), row_max
