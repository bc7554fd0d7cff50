"""Logits of a few rows whose vocabulary is split over TP: their cap, and the token they predict.

Shape legend: c rows of a chunk, V_p rows of the output head on this TP rank.
"""

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_max


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
