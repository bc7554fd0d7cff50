"""Logits of a few rows whose vocabulary is split over TP: their cap, and the token they predict.

Shape legend: c rows of a chunk, V_p rows of the output head on this TP rank.
"""

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_max, all_reduce_sum


def soft_capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """``softcap * tanh(logits / softcap)``, differentiable; the logits themselves without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def capped_logits(
    hidden: torch.Tensor, head_weight: torch.Tensor, softcap: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """This TP rank's logits of a few rows, ``softcap * tanh(logits / softcap)``.

    Args:
        hidden: rows that the head reads.
        head_weight: this TP rank's rows of it.
        softcap: None for plain logits.
        dtype: of the result; the product is of the dtype of the operands.

    Shape:
        ``hidden [c, d]``, ``head_weight [V_p, d]`` -> ``[c, V_p]``, memory of its own.

    Source:
        `DFlashDraftModel.compute_logits` of the public package `dflash`.
    """
    logits = (hidden @ head_weight.T).to(dtype)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def cap_slope(capped: torch.Tensor, softcap: float | None) -> torch.Tensor | None:
    """Derivative of capped logits with respect to plain ones; None where there is no cap."""
    return None if softcap is None else 1 - (capped / softcap).square_()


def label_columns(
    labels: torch.Tensor, vocab_start: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the labels stand among this TP rank's tokens.

    Args:
        labels: global token ids.
        vocab_start: global id of the first local token.
        num_tokens: local ones.

    Returns:
        Columns, any where the label is another rank's, and whether it is this one's.

    Shape:
        ``labels`` int64 ``[c]`` -> int64 ``[c, 1]`` and bool ``[c]``.
    """
    local = labels - vocab_start
    return local.clamp(0, num_tokens - 1)[:, None], (local >= 0) & (local < num_tokens)


def sum_of_row_gradients(
    gradients: tuple[torch.Tensor, ...], tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    """Complete rows' gradients, of which each TP rank has the part through its own tokens.

    One collective for all of them.

    Shape:
        ``[R, width]`` each, widths of their own.
    """
    summed = all_reduce_sum(torch.cat(gradients, dim=1), tp_group, label="loss_dgrad")
    return summed.split([gradient.shape[1] for gradient in gradients], dim=1)


def argmax_over_vocab(
    logits: torch.Tensor, tp_group: dist.ProcessGroup | None, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global id of each row's largest logit, the lowest of equals, and that logit.

    Args:
        logits: this TP rank's.
        tp_group: ranks that share the vocabulary; None for a head in one piece.
        vocab_start: global id of the first local token.

    Shape:
        ``logits [c, V_p]`` -> int64 ``[c]`` and ``[c]``, equal on all TP ranks.
    """
    local_max, token = logits.max(dim=1)
    row_max = all_reduce_max(local_max, tp_group, label="loss_max")
    # Ranks that hold no largest logit stand back; the lowest id of those that do wins.
    not_candidate = torch.iinfo(token.dtype).max
    candidate = torch.where(local_max == row_max, token + vocab_start, not_candidate)
    return -all_reduce_max(-candidate, tp_group, label="predictions"), row_max
