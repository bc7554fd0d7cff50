"""What a slot of a draft block is worth in the loss.

Slot 0 is the anchor's real token and carries no loss. Slot k predicts the token at the anchor plus
k, and counts less the further it is away, because a drafted token is of use only if every token
before it was right.
"""

import torch

# Without supervision, or where a document ends, there is nothing to predict.
IGNORED_PREDICTION = -1


def slot_decay(
    block_size: int, gamma: float, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the weight of each slot of a fully supervised block.

    Args:
        block_size: B, slots of a block, the anchor's slot included.
        gamma: decay length in slots; ``inf`` weighs all slots alike.
        device: where the result lives.

    Shape:
        fp32 ``[B]``: 0 for slot 0, ``exp(-(k - 1) / gamma)`` for slot k.
    """
    distance = torch.arange(-1, block_size - 1, dtype=torch.float32, device=device)
    decay = torch.exp(-distance / gamma)
    decay[0] = 0.0
    return decay


def slot_weights(label_mask: torch.Tensor, block_size: int, gamma: float) -> torch.Tensor:
    """Return the loss weight of every slot of this rank's blocks.

    Args:
        label_mask: whether the slot has a supervised label.
        block_size: B, slots of a block.
        gamma: decay length in slots.

    Returns:
        fp32 weights, 0 where nothing is supervised and in every slot 0.

    Shape:
        ``label_mask`` bool ``[N * B]``, block after block; the result likewise.
    """
    decay = slot_decay(block_size, gamma, device=label_mask.device)
    return (label_mask.view(-1, block_size) * decay).view(-1)
