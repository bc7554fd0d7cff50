"""What a plan costs in seconds: a choice between even work and queries that stay at home."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.context_plan import ContextPlan

# Products of a query-key pair, in units of the two that a forward pass makes (scores, outputs);
# backward makes five (scores again, dV, dP, dQ, dK).
_FORWARD_AND_BACKWARD = 1 + 2.5


@dataclass(frozen=True)
class PlanCost:
    """What one attention layer costs a rank, forward and backward.

    Args:
        pair_seconds: of a query-key pair, all heads.
        row_seconds: of a query row that the rank attends and does not own: it comes and goes.

    Raises:
        ConfigError: a price is negative or no number.
    """

    pair_seconds: float
    row_seconds: float

    def __post_init__(self) -> None:
        for name in ("pair_seconds", "row_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} {getattr(self, name)} must be a number of seconds >= 0")

    @classmethod
    def of_layer(
        cls,
        *,
        num_query_heads: int,
        head_dim: int,
        itemsize: int,
        flops: float,
        bytes_per_second: float,
    ) -> Self:
        """From a layer's shape and a machine's speed; n heads of width d.

        A pair makes 4 n d floating point operations forward (a multiplication and an addition for
        the score, and again for the output) and 2.5 times that backward:
        `pair_seconds = 14 n d / flops`.

        A row comes as q and goes as a partial output with its log-sum-exp; in backward it comes as
        dO with log-sum-exp and delta, and goes as a partial dq:
        `row_seconds = n (4 d itemsize + 3 * 4) / bytes_per_second`.

        How many heads the keys have changes neither: keys stay where they are.

        Args:
            num_query_heads: n, of one tensor-parallel rank.
            head_dim: d.
            itemsize: bytes of an element on the wire; log-sum-exp and delta are fp32.
            flops: that a rank's attention kernel reaches, per second.
            bytes_per_second: that a rank sends or receives while all do.

        Raises:
            ConfigError: a shape or speed is not positive.
        """
        sizes = {
            "num_query_heads": num_query_heads,
            "head_dim": head_dim,
            "itemsize": itemsize,
            "flops": flops,
            "bytes_per_second": bytes_per_second,
        }
        for name, value in sizes.items():
            if not value > 0:
                raise ConfigError(f"{name} {value} must be positive")
        return cls(
            pair_seconds=_FORWARD_AND_BACKWARD * 4 * num_query_heads * head_dim / flops,
            row_seconds=num_query_heads * (4 * head_dim * itemsize + 3 * 4) / bytes_per_second,
        )


def estimate_seconds(plan: ContextPlan, cost: PlanCost) -> float:
    """Seconds that the slowest rank spends on attention and its query rows, all layers together.

    A rank's time is its `work` and the rows of other ranks' blocks that it attends, with query cast
    ``auto``, summed over `plan.windows`. Nothing is assumed to overlap, which is what distinguishes
    plans: what they have in common does not matter for a choice.

    Args:
        plan: any plan; its windows say how many layers there are and what they see.
        cost: of a layer.
    """
    blocks = np.zeros(plan.cp_size, dtype=np.int64)
    for window, layers in Counter(plan.windows).items():
        blocks += layers * _foreign_blocks(plan, window)
    rows = blocks * plan.block_size
    return float((plan.work * cost.pair_seconds + rows * cost.row_seconds).max())


def choose_plan(plans: Sequence[ContextPlan], cost: PlanCost) -> ContextPlan:
    """The plan of the least estimated seconds; the first of equals.

    Args:
        plans: of one micro-batch, at least one.
        cost: of a layer; the same on every rank, or ranks would choose differently.
    """
    return min(plans, key=lambda plan: estimate_seconds(plan, cost))


def _foreign_blocks(plan: ContextPlan, window: int | None) -> NDArray[np.int64]:
    """Blocks of other ranks that every rank attends, int64[P]."""
    if plan.resolve_cast("auto", window) == "all":
        return np.full(plan.cp_size, plan.num_blocks - plan.blocks_per_rank)
    by_owner = plan.needs(window).reshape(plan.cp_size, plan.cp_size, -1).sum(axis=2)
    np.fill_diagonal(by_owner, 0)
    return by_owner.sum(axis=1)
