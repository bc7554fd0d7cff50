"""The projection of the target's features, which are data: no gradient goes back into them."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear


class FeatureProjection(ColumnParallelLinear):
    """Megatron's column-parallel linear without the gradient of its input.

    Megatron's own multiplies out ``[S, C * d]`` of it, and sums that over TP, whether anybody asked
    or not: as much work and memory as the features themselves.
    """

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        return F.linear(input, weight)
