"""The drafter's loss written down directly: all logits at once, autograd for the gradient.

The twin that the chunked, vocabulary-parallel loss is tested against.
"""

import torch
import torch.nn.functional as F

from megatron_splitkv.loss.draft_loss import DraftLoss
from megatron_splitkv.loss.slots import IGNORED_PREDICTION
from megatron_splitkv.loss.vocabulary import soft_capped


def naive_draft_loss(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    softcap: float | None = None,
    dpace_block_size: int | None = None,
    teacher_hidden: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
) -> DraftLoss:
    """Weighted sum of losses; arguments and result as `chunked_draft_loss`, on one process.

    Shape:
        ``hidden``, ``teacher_hidden`` ``[rows, d]``, ``head_weight [V, d]``, ``labels`` and
        ``weights`` ``[rows]``.
    """
    priced = weights > 0
    logits = soft_capped(hidden[priced] @ head_weight.T, softcap)
    losses = cross_entropy = F.cross_entropy(logits, labels[priced], reduction="none")
    used = weights.to(logits.dtype).clone()
    if dpace_block_size is not None:
        confidence = torch.zeros_like(used)
        confidence[priced] = torch.exp(-cross_entropy.detach())
        used *= naive_dpace_weights(
            confidence.view(-1, dpace_block_size), priced.view(-1, dpace_block_size)
        ).view(-1)
    divergence = torch.zeros((), dtype=logits.dtype)
    if teacher_hidden is not None:
        teacher = soft_capped(teacher_hidden[priced] @ head_weight.T, softcap).log_softmax(-1)
        kl = F.kl_div(logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)
        losses = (1 - distillation_weight) * cross_entropy + distillation_weight * kl
        divergence = (kl.detach() * used[priced]).sum()
    predictions = torch.full_like(labels, IGNORED_PREDICTION)
    predictions[priced] = logits.argmax(dim=-1)
    return DraftLoss((losses * used[priced]).sum(), predictions, used, divergence)


def naive_dpace_weights(
    confidence: torch.Tensor, supervised: torch.Tensor, smoothing: float = 0.5
) -> torch.Tensor:
    """`dpace_weights` as the sum of products that defines it.

    Shape:
        ``[blocks, B]`` each.
    """
    weights = torch.zeros_like(confidence)
    for block, slots in enumerate(supervised):
        trained = slots.nonzero().squeeze(1).tolist()
        smoothed = (1 - smoothing) * confidence[block] + smoothing
        for j, slot in enumerate(trained):
            for m in range(j, len(trained)):
                weights[block, slot] += smoothed[trained[: m + 1]].prod()
    return weights
