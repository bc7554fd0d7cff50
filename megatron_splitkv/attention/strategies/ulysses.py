"""Ulysses (``a2a``): every rank attends all rows of all ranks, for its share of the heads.

All-to-alls exchange rows for heads before the attention and heads for rows behind it. A rank's
query heads read its key heads: where there are fewer key heads than ranks, each goes to a group of
ranks, and the gradients that these return are added up, in fp32. From there on more ranks no longer
mean less key traffic for each. The work is balanced whatever the plan.

Source:
    Jacobs et al., DeepSpeed-Ulysses, 2024.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.attention.strategies.region import (
    Gradients,
    PeerStrategy,
    Saved,
    add_,
    nothing_attended,
    zero_sum,
)
from megatron_splitkv.comm import Pending, launch_all_to_all
from megatron_splitkv.config import ConfigError


def check_heads(num_heads: int, num_key_heads: int, cp_size: int) -> None:
    """Refuse heads that cannot be dealt out to the ranks.

    Args:
        num_heads: query heads of one tensor-parallel rank.
        num_key_heads: its key and value heads.
        cp_size: ranks of the context-parallel group.

    Raises:
        ConfigError: naming the heads and the ranks.
    """
    if num_heads % cp_size:
        raise ConfigError(
            f"--cp-comm-type a2a splits query heads over context parallelism: {num_heads} query "
            f"heads (on one tensor-parallel rank) do not divide among {cp_size} ranks; use a "
            "context-parallel size that divides them, or another --cp-comm-type"
        )
    if num_key_heads % cp_size and cp_size % num_key_heads:
        raise ConfigError(
            f"--cp-comm-type a2a deals {num_key_heads} key heads (on one tensor-parallel rank) to "
            f"{cp_size} context-parallel ranks: one number must divide the other; use another "
            "context-parallel size, or another --cp-comm-type"
        )


class UlyssesAttention(PeerStrategy):
    """See the module.

    Shape legend: A = P * Q_p query rows of all ranks, K = S + A key rows (of rank 0 its context,
    then its own blocks; of rank 1 ...), n and m query and key heads of this rank.

    Args:
        num_heads: query heads of all ranks of the group.
        num_key_heads: their key heads.
        **kwargs: as `PeerStrategy`.

    Raises:
        ConfigError: see `check_heads`.
    """

    def __init__(self, *args: Any, num_heads: int, num_key_heads: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_heads(num_heads, num_key_heads, self.size)
        self.num_key_heads = num_key_heads
        self.key_heads = max(1, num_key_heads // self.size)
        self.key_rows = [self.rows_of(rank) + self.query_rows for rank in range(self.size)]

    def forward(
        self,
        q: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """See `PeerStrategy.forward`."""
        launched = [
            self._launch_heads(q, "q"),
            self._launch_keys(context_k, own_k, "k"),
            self._launch_keys(context_v, own_v, "v"),
        ]
        rows, k, v = (pending.wait() for pending in launched)
        out, lse = total = nothing_attended(rows)
        for rank, mine, keys, values in self._by_rank(k, v):
            self.attend_(total, rows, keys[0], values[0], self._context_staircase(rank))
            own = (out[mine], lse[mine])
            self.attend_(own, rows[mine], keys[1], values[1], self.own_staircase(rank))
        out = out.to(q.dtype)
        return self._wait_rows(self._launch_rows(out, "out")), (rows, k, v, out, lse)

    def backward(self, grad_out: torch.Tensor, saved: Saved) -> Gradients:
        """See `PeerStrategy.backward`."""
        rows, k, v, out, lse = saved
        grad_out = self._launch_heads(grad_out, "grad_out").wait()
        grad_rows, grad_k, grad_v = zero_sum(rows), torch.zeros_like(k), torch.zeros_like(v)
        for (rank, mine, keys, values), (_, _, *sums) in zip(
            self._by_rank(k, v), self._by_rank(grad_k, grad_v), strict=True
        ):
            visible = (
                (slice(None), self._context_staircase(rank)),
                (mine, self.own_staircase(rank)),
            )
            for part, (which, staircase) in enumerate(visible):
                partial = self.gradients(
                    grad_out[which],
                    rows[which],
                    keys[part],
                    values[part],
                    out[which],
                    lse[which],
                    staircase,
                )
                add_((grad_rows[which], *(x[part] for x in sums)), partial)
        launched = [self._launch_key_gradients(x, n) for x, n in ((grad_k, "k"), (grad_v, "v"))]
        grad_q = self._wait_rows(self._launch_rows(grad_rows.to(rows.dtype), "grad_q"))
        (context_k, own_k), (context_v, own_v) = map(self._wait_key_gradients, launched)
        return grad_q, context_k, context_v, own_k, own_v

    # Rows of this rank <-> heads of this rank

    def _launch_heads(self, rows: torch.Tensor, label: str) -> Pending:
        """``[Q_p, n_q, d]`` -> ``[A, n, d]``."""
        by_rank = rows.unflatten(1, (self.size, -1)).transpose(0, 1)
        return launch_all_to_all(by_rank.flatten(0, 1), self.group, label=label)

    def _launch_rows(self, heads: torch.Tensor, label: str) -> Pending:
        return launch_all_to_all(heads, self.group, label=label)

    def _wait_rows(self, pending: Pending) -> torch.Tensor:
        """``[A, n, d]`` -> ``[Q_p, n_q, d]``."""
        by_rank = pending.wait().unflatten(0, (self.size, self.query_rows))
        return by_rank.transpose(0, 1).flatten(1, 2)

    def _launch_keys(self, context: torch.Tensor, own: torch.Tensor, label: str) -> Pending:
        """``[S_p, n_kv, d]`` and ``[Q_p, n_kv, d]`` -> ``[K, m, d]``."""
        rows = self.key_rows[self.rank]
        sent = context.new_empty((self.size, rows, self.key_heads, context.shape[2]))
        for rank, buffer in enumerate(sent):
            first = rank * self.num_key_heads // self.size
            heads = slice(first, first + self.key_heads)
            for part, x in zip(buffer.split([len(context), len(own)]), (context, own), strict=True):
                part.copy_(x[:, heads])
        return launch_all_to_all(
            sent.flatten(0, 1),
            self.group,
            label=label,
            sent_rows=[rows] * self.size,
            received_rows=self.key_rows,
        )

    def _launch_key_gradients(self, gradients: torch.Tensor, name: str) -> Pending:
        """``[K, m, d]`` -> ``[P * (S_p + Q_p), m, d]``."""
        return launch_all_to_all(
            gradients,
            self.group,
            label=f"grad_{name}",
            sent_rows=self.key_rows,
            received_rows=[self.key_rows[self.rank]] * self.size,
        )

    def _wait_key_gradients(self, pending: Pending) -> list[torch.Tensor]:
        """-> ``[S_p, n_kv, d]``, ``[Q_p, n_kv, d]``: sums over the ranks that share a head."""
        received = pending.wait()
        rows = self.key_rows[self.rank]
        by_head = received.unflatten(0, (self.num_key_heads // self.key_heads, -1, rows))
        if by_head.shape[1] > 1:
            dtype = accumulator_dtype(received.dtype)
            by_head = by_head.sum(dim=1, dtype=dtype, keepdim=True).to(received.dtype)
        # [groups, 1, rows, m, d] -> [rows, n_kv, d]
        joined = by_head.squeeze(1).transpose(0, 1).flatten(1, 2)
        return list(joined.split([self.rows_of(self.rank), self.query_rows]))

    # What this rank holds, by the rank whose rows they are

    def _context_staircase(self, rank: int) -> Any:
        return self.plan.staircase(rank, self.kernel.LEAF_LIMITS, window=self.window)

    def _by_rank(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, slice, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
        """Rank, its query rows, its context and own keys, and their values: views."""
        for rank, (keys, values) in enumerate(
            zip(k.split(self.key_rows), v.split(self.key_rows), strict=True)
        ):
            parts = [self.rows_of(rank), self.query_rows]
            first = rank * self.query_rows
            mine = slice(first, first + self.query_rows)
            yield rank, mine, keys.split(parts), values.split(parts)
