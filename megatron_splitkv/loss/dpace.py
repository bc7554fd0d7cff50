"""D-PACE: slots weigh by the acceptance that they can still earn, as the drafter now stands.

With q_i the drafter's own probability of the label of slot i, a block is accepted up to slot m with
the product of q_1 .. q_m, and the sum of these over m is its expected number of accepted tokens. Of
that sum the terms from m = j on rise with slot j, in proportion to it, so its gradient is the one
of ``sum of w_j log q_j`` with

    w_j = sum over m >= j of (product over i <= m of q_i).

So early slots weigh most while the drafter is bad, and later ones come in as it learns. The q_i
are drawn towards one, ``0.5 q + 0.5``, so that no slot is lost behind one that fails, and the
weights carry no gradient of their own.

The mean loss is taken over these weights, as over any others: they are the denominator too. That
is a sum over all ranks and packs of a step, so it sets the length of the step and leaves the
direction, that of the expected acceptance of all blocks. A block's slots lie on one rank, which
knows all that its weights depend on: they are the same at any context-parallel size.

Source:
    D-PACE, arXiv:2605.18810, equations 7 to 9; sgl-project/SpecForge specforge/core/dflash.py
    (``loss_type="dpace"``) and NVIDIA/Model-Optimizer modelopt/torch/speculative/plugins/
    hf_dflash.py, which passes over unsupervised slots alike and divides by the sum of weights.
"""

import torch

SMOOTHING = 0.5


def dpace_weights(
    confidence: torch.Tensor, supervised: torch.Tensor, smoothing: float = SMOOTHING
) -> torch.Tensor:
    """Return the weights of the slots of some blocks.

    Args:
        confidence: the drafter's probability of each slot's label; any value, NaN too, where
            nothing is supervised.
        supervised: slots with a label. The others neither weigh nor count in the products.
        smoothing: share of one in the confidence that is used.

    Returns:
        Detached weights in the dtype of `confidence`, 0 where nothing is supervised.

    Shape:
        ``[blocks, B]`` each.
    """
    smoothed = (1 - smoothing) * confidence.detach() + smoothing
    reached = torch.where(supervised, smoothed, 1.0).cumprod(dim=1) * supervised
    return reached.flip(1).cumsum(dim=1).flip(1) * supervised


def most_dpace_weight(num_slots: int) -> float:
    """The most that a block of so many trained slots can weigh: every slot surely right."""
    return num_slots * (num_slots + 1) / 2
