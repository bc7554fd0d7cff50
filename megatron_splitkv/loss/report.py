"""What a training log says about a drafter besides its loss."""

import torch


def drafter_report(
    predictions: torch.Tensor,
    labels: torch.Tensor,
    label_mask: torch.Tensor,
    block_keep_mask: torch.Tensor,
    block_size: int,
    first_slot: int = 1,
) -> dict[str, torch.Tensor]:
    """Accuracy of every slot and the acceptance length that verification would have given.

    All values are (numerator, denominator) pairs over this rank's own blocks: add them over ranks
    and micro-batches, then divide.

    The simulated acceptance length of a block is one (the target's own token) plus the number of
    slots that are right before the first that is not. A slot without supervision ends the count: it
    lies behind the document's end or outside the response, where a real draft would have been cut
    too. So a block close to such an end counts with what it could still earn.

    Args:
        predictions: predicted token of every slot.
        labels: token that was due.
        label_mask: whether the slot is supervised.
        block_keep_mask: whether the block is real, not padding.
        block_size: B, slots of a block.
        first_slot: the first that predicts a token.

    Returns:
        ``"accept_len"`` and ``"slot_k_accuracy"`` for k from the first slot to B - 1, fp32 ``[2]``
        each.

    Shape:
        ``predictions``, ``labels``, ``label_mask`` ``[N * B]``, ``block_keep_mask [N]``.
    """
    supervised = label_mask.view(-1, block_size)[:, first_slot:]
    right = (predictions == labels).view(-1, block_size)[:, first_slot:] & supervised
    accepted = 1 + right.long().cumprod(dim=1).sum(dim=1)
    report = {"accept_len": _pair((accepted * block_keep_mask).sum(), block_keep_mask.sum())}
    right_per_slot, supervised_per_slot = right.sum(dim=0), supervised.sum(dim=0)
    for i in range(block_size - first_slot):
        report[f"slot_{first_slot + i}_accuracy"] = _pair(right_per_slot[i], supervised_per_slot[i])
    return report


def _pair(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return torch.stack([numerator, denominator]).float()
