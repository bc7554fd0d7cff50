"""What drafts cost through a frozen output head, a few rows at a time, the vocabulary over TP.

The logits of all draft rows (``rows x V``) would be by far the largest tensor of a step. The head
is frozen, so a row's gradient needs nothing but that row's logits: loss and gradient are taken
chunk by chunk while the logits exist, and only the gradient (``rows x d``) is kept. Everything that
can change a row's price is known there too: D-PACE needs the slots of one block, which a chunk
holds together.

Shape legend: R rows of this rank, d hidden size, V_p rows of the head on this TP rank, c rows of a
chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_max, all_reduce_sum
from megatron_splitkv.loss.dpace import dpace_weights
from megatron_splitkv.loss.slots import IGNORED_PREDICTION
from megatron_splitkv.loss.vocabulary import (
    argmax_over_vocab,
    cap_slope,
    capped_logits,
    label_columns,
)

# 512 rows x 250k tokens are 0.5 GB in fp32, and enough rows to keep a matmul busy.
DEFAULT_CHUNK_ROWS = 512


@dataclass(frozen=True)
class DraftLoss:
    """What `chunked_draft_loss` found out about this rank's rows.

    Args:
        numerator: sum of weight times loss, fp32 (fp64 for fp64 input), complete on every TP rank,
            local to this CP rank; its gradient with respect to the rows is complete as well.
        predictions: global token ids, the lowest of equals; `IGNORED_PREDICTION` where the weight
            is 0.
        weights: what the rows weighed, in the dtype of the numerator; their sum is the denominator.
        divergence: sum of weight times KL divergence, detached; 0 without a teacher.

    Shape:
        predictions and weights ``[R]``, scalars else.
    """

    numerator: torch.Tensor
    predictions: torch.Tensor
    weights: torch.Tensor
    divergence: torch.Tensor


def chunked_draft_loss(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    softcap: float | None = None,
    dpace_block_size: int | None = None,
    teacher_hidden: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
) -> DraftLoss:
    """Weighted sum of the losses of this rank's rows, and the predicted tokens.

    A row's loss is its cross-entropy, or with a teacher
    ``(1 - distillation_weight) * cross-entropy + distillation_weight * KL(teacher || drafter)``.

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
        chunk_rows: logits exist for at most that many rows at once, or a block's if that is more.
        softcap: c of logits that are ``c tanh(logits / c)``, the teacher's too; None without.
        dpace_block_size: B, to multiply the weights with those of D-PACE; rows are slots, block
            after block. None leaves the weights as they are.
        teacher_hidden: what the target's head read where it said the label; any value where the
            weight is 0. None without distillation.
        distillation_weight: share of the divergence, in [0, 1].

    Shape:
        ``hidden``, ``teacher_hidden`` ``[R, d]``, ``head_weight [V_p, d]``, ``labels`` and
        ``weights`` ``[R]``.
    """
    options = _Options(tp_group, vocab_start, chunk_rows, softcap, dpace_block_size)
    if teacher_hidden is None:
        distillation_weight = 0.0
    return DraftLoss(
        *_ChunkedDraftLoss.apply(
            hidden, head_weight, labels, weights, teacher_hidden, distillation_weight, options
        )
    )


@dataclass(frozen=True)
class _Options:
    tp_group: dist.ProcessGroup | None
    vocab_start: int
    chunk_rows: int
    softcap: float | None
    dpace_block_size: int | None

    def chunks(self, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """Rows that weigh something, a chunk at a time, and the row at which its blocks begin.

        The host waits once for their number, against projecting padding and slots without a label.
        TP ranks hold the same rows, so they go through the same chunks and collectives.
        """
        rows = weights.nonzero().squeeze(1)
        if self.dpace_block_size is None:
            for chunk in rows.split(self.chunk_rows):
                yield chunk, 0
            return
        # Whole blocks: as many rows of each group of them as weigh something.
        group = max(1, self.chunk_rows // self.dpace_block_size) * self.dpace_block_size
        padding = -weights.numel() % group
        weighing = torch.nn.functional.pad(weights != 0, (0, padding)).view(-1, group)
        for i, chunk in enumerate(rows.split(weighing.sum(dim=1).tolist())):
            if chunk.numel():
                yield chunk, i * group

    def dpace(
        self, cross_entropy: torch.Tensor, rows: torch.Tensor, first_row: int
    ) -> torch.Tensor:
        """D-PACE weights of a chunk's rows."""
        size = self.dpace_block_size
        assert size is not None
        slots = max(1, self.chunk_rows // size) * size
        confidence = cross_entropy.new_zeros(slots)
        confidence[rows - first_row] = torch.exp(-cross_entropy)
        supervised = torch.zeros(slots, dtype=torch.bool, device=rows.device)
        supervised[rows - first_row] = True
        weights = dpace_weights(confidence.view(-1, size), supervised.view(-1, size))
        return weights.view(-1)[rows - first_row]


class _ChunkedDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        teacher_hidden: torch.Tensor | None,
        share: float,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tp_group, softcap = options.tp_group, options.softcap
        numerator, divergence = (hidden.new_zeros((), dtype=dtype) for _ in range(2))
        predictions = torch.full_like(labels, IGNORED_PREDICTION)
        weights = weights.to(dtype, copy=True)
        wants_grad = ctx.needs_input_grad[0]
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None

        for rows, first_row in options.chunks(weights):
            logits = capped_logits(hidden[rows], head_weight, softcap, dtype)  # [c, V_p]
            predictions[rows], row_max = argmax_over_vocab(logits, tp_group, options.vocab_start)

            column, is_local = label_columns(
                labels[rows], options.vocab_start, head_weight.shape[0]
            )
            label_logit = logits.gather(1, column).squeeze(1).masked_fill(~is_local, 0.0)

            teacher = None
            sums = [label_logit]
            if teacher_hidden is not None:
                teacher = capped_logits(
                    teacher_hidden[rows].to(hidden.dtype), head_weight, softcap, dtype
                )
                teacher_max = all_reduce_max(teacher.amax(dim=1), tp_group, label="teacher_max")
                difference = teacher - logits
                teacher.sub_(teacher_max[:, None]).exp_()
                sums += [teacher.sum(dim=1), difference.mul_(teacher).sum(dim=1)]
                del difference
            slope = cap_slope(logits, softcap) if grad_hidden is not None else None
            exponentials = logits.sub_(row_max[:, None]).exp_()
            denominator, label_logit, *of_teacher = all_reduce_sum(
                torch.stack([exponentials.sum(dim=1), *sums]), tp_group, label="loss_sums"
            )
            lse = denominator.log() + row_max
            loss = cross_entropy = lse - label_logit
            if options.dpace_block_size is not None:
                weights[rows] *= options.dpace(cross_entropy, rows, first_row)
            price = weights[rows]
            if of_teacher:
                # sum of p (t - s) - lse(t) + lse(s), with p, t the teacher's and s our logits.
                teacher_sum, difference = of_teacher
                kl = difference / teacher_sum - (teacher_sum.log() + teacher_max) + lse
                divergence += (price * kl).sum()
                loss = (1 - share) * cross_entropy + share * kl
            numerator += (price * loss).sum()

            if grad_hidden is not None:
                # d loss / d logits = weight * (softmax - what it should be), local columns only.
                grad_logits = exponentials.mul_((price / denominator)[:, None])
                grad_logits.scatter_add_(1, column, -((1 - share) * price * is_local)[:, None])
                if teacher is not None:
                    grad_logits.sub_(teacher.mul_((share * price / of_teacher[0])[:, None]))
                if slope is not None:
                    grad_logits.mul_(slope)
                grad_hidden[rows] = grad_logits.to(hidden.dtype) @ head_weight

        ctx.tp_group = tp_group
        ctx.save_for_backward(*(() if grad_hidden is None else (grad_hidden,)))
        ctx.mark_non_differentiable(predictions, weights, divergence)
        return numerator, predictions, weights, divergence

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        grad_hidden = grad_hidden * grad_outputs[0].to(grad_hidden.dtype)
        # Each TP rank saw the columns of its own tokens: the gradient is the sum over them.
        return all_reduce_sum(grad_hidden, ctx.tp_group, label="loss_dgrad"), *[None] * 6
