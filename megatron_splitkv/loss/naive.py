"""The drafter's loss written down directly: all logits at once, autograd for the gradient.

The twin that the chunked, vocabulary-parallel loss is tested against.
"""

import torch
import torch.nn.functional as F

from megatron_splitkv.loss.slots import IGNORED_PREDICTION


def naive_cross_entropy(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of cross-entropies and the predicted tokens.

    Args:
        hidden: drafter output.
        head_weight: the whole output head.
        labels: token to predict.
        weights: price of each row; a row of weight 0 is ignored whatever it holds.

    Returns:
        The numerator, differentiable, and the predictions, `IGNORED_PREDICTION` where the weight
        is 0.

    Shape:
        ``hidden [rows, d]``, ``head_weight [V, d]``, ``labels`` and ``weights`` and predictions
        ``[rows]``; the numerator is a scalar.
    """
    priced = weights > 0
    logits = hidden[priced] @ head_weight.T
    losses = F.cross_entropy(logits, labels[priced], reduction="none")
    predictions = torch.full_like(labels, IGNORED_PREDICTION)
    predictions[priced] = logits.argmax(dim=-1)
    return (losses * weights[priced]).sum(), predictions
