"""What a slot of a draft block is worth in the loss.

Slot 0 is the anchor's real token. In DFlash it carries no loss, and slot k predicts the token at
the anchor plus k; drafters with shifted labels predict the token behind a slot, from slot 0 on. A
slot counts less the further it is away, because a drafted token is of use only if every token
before it was right.
"""

import torch

# Without supervision, or where a document ends, there is nothing to predict.
IGNORED_PREDICTION = -1


def slot_decay(
    block_size: int,
    gamma: float,
    first_slot: int = 1,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the weight of each slot of a fully supervised block.

    Args:
        block_size: B, slots of a block, the anchor's slot included.
        gamma: decay length in slots; ``inf`` weighs all slots alike.
        first_slot: the first that predicts a token: 1, or 0 with shifted labels.
        device: where the result lives.

    Shape:
        fp32 ``[B]``: ``exp(-(k - first_slot) / gamma)`` for slot k, 0 before the first.
    """
    slots = torch.arange(block_size, dtype=torch.float32, device=device)
    decay = torch.exp(-(slots - first_slot) / gamma)
    decay[:first_slot] = 0.0
    return decay


def slot_weights(
    label_mask: torch.Tensor, block_size: int, gamma: float, first_slot: int = 1
) -> torch.Tensor:
    """Return the loss weight of every slot of this rank's blocks.

    Args:
        label_mask: whether the slot has a supervised label.
        block_size: B, slots of a block.
        gamma: decay length in slots.
        first_slot: the first that predicts a token.

    Returns:
        fp32 weights, 0 where nothing is supervised and before the first slot.

    Shape:
        ``label_mask`` bool ``[N * B]``, block after block; the result likewise.
    """
    decay = slot_decay(block_size, gamma, first_slot, device=label_mask.device)
    return (label_mask.view(-1, block_size) * decay).view(-1)
