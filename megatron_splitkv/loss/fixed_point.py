"""How a loss with fractional weights goes through Megatron's integer token count.

With ``--calculate-per-token-loss`` Megatron divides summed gradients by a summed token count, which
it keeps in an int32. The denominator of a drafter's loss is a sum of slot weights. So the count is
fixed point: a pack of weight W counts as ``n = round(256 W)`` tokens. Its loss is scaled by
``n / W`` and not by 256, so that rounding cannot change the mean over a pack. What is left is that
the packs of one step weigh n instead of 256 W in their mean: at most ``1 / (512 W)`` off, and the
same at every context-parallel size.

W is the pack's weight over all ranks of its CP group. One of them reports the count, because
Megatron sums counts over ranks.

D-PACE's weights follow from the drafter's own output, which differs by fp32 rounding from one
context-parallel size to another, and so does W. It may fall to the other side of a half: then n
differs by one, which again moves the mean over a pack not at all and the packs of a step against
each other by less than ``1 / (256 W)``. The larger W, the likelier, but the less it matters: it
stays within the rounding of the weights themselves.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_sum, group_rank
from megatron_splitkv.config import ConfigError
from megatron_splitkv.loss.dpace import most_dpace_weight
from megatron_splitkv.loss.slots import slot_decay

FIXED_POINT_SCALE = 256
MAX_TOKEN_COUNT = torch.iinfo(torch.int32).max

# Vanishes beside any real count in fp32, and turns 0 / 0 into 0.
_EMPTY_DENOMINATOR = 1e-30


def fixed_point_loss(
    numerator: torch.Tensor,
    weights: torch.Tensor,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the token count that Megatron wants from a loss function.

    Summed over all ranks and micro-batches, ``loss / num_tokens`` is ``sum(CE w) / sum(w)``. A rank
    or a whole pack without supervision returns zeros, with the graph intact: its backward pass and
    all its collectives still run.

    Args:
        numerator: weighted cross-entropies of this rank's blocks.
        weights: this rank's slot weights.
        cp_group: ranks that share the pack.

    Returns:
        loss: fp32, the scaled numerator of this rank.
        num_tokens: int32, the pack's count on the group's first rank and 0 on the others.

    Shape:
        ``weights [N * B]``; all others scalars.
    """
    # In fp64, so that the order of the ranks cannot tip the rounding.
    pack_weight = all_reduce_sum(weights.sum(dtype=torch.float64), cp_group, label="pack_weight")
    count = (FIXED_POINT_SCALE * pack_weight).round().clamp(min=1) * (pack_weight > 0)
    scale = torch.where(pack_weight > 0, count / pack_weight, 0.0)
    reports_count = group_rank(cp_group) == 0
    num_tokens = count.to(torch.int32) if reports_count else count.new_zeros((), dtype=torch.int32)
    return numerator * scale.to(numerator.dtype), num_tokens


def check_token_count(
    num_blocks: int,
    block_size: int,
    gamma: float,
    packs_per_step: int,
    first_slot: int = 1,
    loss_weights: str = "decay",
) -> None:
    """Refuse a global batch whose count might not fit Megatron's int32.

    Needs no tensor, so it can run at start and on every rank alike.

    Args:
        num_blocks: most blocks that a pack can keep, over all CP ranks.
        block_size: B.
        gamma: decay length in slots.
        packs_per_step: packs of a global batch.
        first_slot: the first that predicts a token.
        loss_weights: ``decay``, or ``dpace``, without a gamma.

    Raises:
        ConfigError: naming the sum of weights and the limit.
    """
    if loss_weights == "dpace":
        most = most_dpace_weight(block_size - first_slot)
    else:
        most = float(slot_decay(block_size, gamma, first_slot).sum())
    weight = num_blocks * packs_per_step * most
    limit = MAX_TOKEN_COUNT / FIXED_POINT_SCALE
    if weight > limit:
        raise ConfigError(
            f"a global batch of {packs_per_step} packs with {num_blocks} blocks each can weigh "
            f"{weight:,.0f}; Megatron's int32 token count holds {limit:,.0f}: lower "
            "--global-batch-size or --num-anchors"
        )


def loggable(report: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make (numerator, denominator) pairs safe for Megatron's log, which divides their sums.

    A batch without supervision would be logged as 0 / 0. Its denominators become tiny instead, so
    that 0 is logged; denominators of other ranks and micro-batches are not changed by it.

    Args:
        report: fp32 ``[2]`` per name.
    """
    return {
        name: torch.stack([pair[0], pair[1].clamp(min=_EMPTY_DENOMINATOR)])
        for name, pair in report.items()
    }
