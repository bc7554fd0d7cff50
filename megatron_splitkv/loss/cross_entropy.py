"""Cross-entropy through a frozen head, a few rows at a time, the vocabulary split over TP."""

import torch
import torch.distributed as dist

from megatron_splitkv.loss.draft_loss import DEFAULT_CHUNK_ROWS, chunked_draft_loss


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the cross-entropies of this rank's rows, and the predicted tokens.

    `chunked_draft_loss` with nothing but labels to learn from.

    Args:
        hidden: drafter output after the final norm, equal on all TP ranks.
        head_weight: this TP rank's rows of the frozen output head.
        labels: token to predict (global id); any value where the weight is 0.
        weights: price of each row.
        tp_group: ranks that share the vocabulary; None for a head in one piece.
        vocab_start: global id of the first local row of the head.
        chunk_rows: logits exist for at most that many rows at once.
        softcap: c of logits that are ``c tanh(logits / c)``; None without.

    Returns:
        numerator: ``sum(weight * cross-entropy)``, fp32 (fp64 for fp64 input), complete on every TP
            rank, local to this CP rank; its gradient with respect to `hidden` is complete as well.
        predictions: global token ids, the lowest of equals; `IGNORED_PREDICTION` where the weight
            is 0.

    Shape:
        ``hidden [R, d]``, ``head_weight [V_p, d]``, ``labels``, ``weights``, predictions ``[R]``.
    """
    priced = chunked_draft_loss(
        hidden,
        head_weight,
        labels,
        weights,
        tp_group=tp_group,
        vocab_start=vocab_start,
        chunk_rows=chunk_rows,
        softcap=softcap,
    )
    return priced.numerator, priced.predictions
