"""All-gather of keys and values (``all_gather``): every rank gets the whole context.

Forward, each rank attends its own queries to every rank's keys. Backward, it returns a gradient for
each of these to their owner, in the dtype of the keys; owners add up in fp32. The two transfers of
each direction are the fewest of all strategies; the context's keys and values on every rank are the
most memory: backward keeps them, or gathers them again.

Source:
    Context parallelism of torch's flex attention, of NeMo-RL, and of Llama 3 (2024).
"""

from typing import Any

import torch

from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.attention.strategies.region import (
    Gradients,
    PeerStrategy,
    Saved,
    add_,
    in_dtype_of,
    nothing_attended,
    zero_sum,
)
from megatron_splitkv.comm import launch_all_to_all, launch_gather_uneven


class AllGatherAttention(PeerStrategy):
    """See the module; communication and memory grow with the context.

    Args:
        *args: as `PeerStrategy`.
        gather_again: keep only this rank's keys and values for backward.
        **kwargs: as `PeerStrategy`.
    """

    def __init__(self, *args: Any, gather_again: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gather_again = gather_again
        self.shards = [self.rows_of(rank) for rank in range(self.size)]

    def forward(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """See `PeerStrategy.forward`."""
        pending = self._launch_gather(context_k, context_v)
        total = nothing_attended(q)
        self.attend_(total, q, own_k, own_v, self.own_staircase(self.rank))
        all_k, all_v = (gathered.wait() for gathered in pending)
        for source, (k, v) in enumerate(self._by_rank(all_k, all_v)):
            self.attend_(total, q, k, v, self.staircase(source, self.rank))
        out, lse = total[0].to(q.dtype), total[1]
        kept = (context_k, context_v) if self.gather_again else (all_k, all_v)
        return out, (q, *kept, own_k, own_v, out, lse)

    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """See `PeerStrategy.backward`."""
        q, all_k, all_v, own_k, own_v, out, lse = saved
        if self.gather_again:
            all_k, all_v = (gathered.wait() for gathered in self._launch_gather(all_k, all_v))
        grad_q, *grad_own = map(zero_sum, (q, own_k, own_v))
        grad_all = torch.zeros_like(all_k), torch.zeros_like(all_v)
        shards = zip(self._by_rank(all_k, all_v), self._by_rank(*grad_all), strict=True)
        for source, ((k, v), grad_shard) in enumerate(shards):
            visible = self.staircase(source, self.rank)
            partial = self.gradients(grad_out, q, k, v, out, lse, visible)
            add_((grad_q, *grad_shard), partial)
        returning = [
            launch_all_to_all(
                x,
                self.group,
                label=label,
                sent_rows=self.shards,
                received_rows=[self.shards[self.rank]] * self.size,
            )
            for label, x in zip(("grad_k", "grad_v"), grad_all, strict=True)
        ]
        own = self.own_staircase(self.rank)
        add_((grad_q, *grad_own), self.gradients(grad_out, q, own_k, own_v, out, lse, own))
        grad_context = (self._sum(pending.wait()) for pending in returning)
        return in_dtype_of(saved, grad_q, *grad_context, *grad_own)

    def _launch_gather(self, k: torch.Tensor, v: torch.Tensor) -> list[Any]:
        return [
            launch_gather_uneven(x, self.group, label=label, rows=self.shards)
            for label, x in (("k", k), ("v", v))
        ]

    def _by_rank(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(k.split(self.shards), v.split(self.shards), strict=True))

    def _sum(self, contributions: torch.Tensor) -> torch.Tensor:
        """What all ranks contribute to this rank's rows, added in the accumulator dtype."""
        by_rank = contributions.unflatten(0, (self.size, self.shards[self.rank]))
        return by_rank.sum(dim=0, dtype=accumulator_dtype(contributions.dtype))
