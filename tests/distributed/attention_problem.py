"""One attention problem for all ranks: global tensors, this rank's share, and the whole again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions, context_parallel_attention
from megatron_splitkv.comm import group_rank
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import dense_sdpa_attention, reference_attention, subgroup

NAMES = ("out", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class Problem:
    """Blocks over packed documents, and how to attend.

    `anchors` holds one list per document, relative to its start; None is a padding block.
    """

    document_lengths: tuple[int, ...]
    anchors: tuple[tuple[int | None, ...], ...]
    block_size: int = 4
    tail_rows: int = 0
    num_heads: int = 4
    num_key_heads: int = 2
    head_width: int = 8
    dtype: torch.dtype = torch.float64
    strategy: str = "lpt"
    block_order: str = "contiguous"
    chunks_per_rank: int | None = None
    comm: str = "splitkv"
    kernel: str = "cpu"
    strided: bool = False
    window: int | None = None
    options: SplitKVOptions = field(default_factory=SplitKVOptions)
    score_scale: float = 1.0
    seed: int = 0

    @property
    def context_length(self) -> int:
        return sum(self.document_lengths) + self.tail_rows

    def plan(self, cp_size: int) -> ContextPlan:
        starts = np.cumsum((0, *self.document_lengths[:-1]))
        blocks = [(s, a) for s, row in zip(starts, self.anchors, strict=True) for a in row]
        layout = BlockLayout(
            anchor_positions=np.array([s + (a or 0) for s, a in blocks], dtype=np.int64),
            document_starts=np.array([s for s, _ in blocks], dtype=np.int64),
            block_keep_mask=np.array([a is not None for _, a in blocks], dtype=np.bool_),
            block_size=self.block_size,
        )
        return build_plan(
            layout,
            self.context_length,
            cp_size,
            strategy=self.strategy,
            chunks_per_rank=self.chunks_per_rank,
            block_order=self.block_order,
        )

    def tensors(self, plan: ContextPlan) -> list[torch.Tensor]:
        """Global q, k, v (context, then own rows) and the gradient of the output."""
        rows = plan.layout.num_blocks * plan.layout.block_size
        generator = torch.Generator().manual_seed(self.seed)

        def draw(length: int, heads: int) -> torch.Tensor:
            shape = (length, heads, self.head_width)
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
            return x.to(self.dtype)

        keys = self.context_length + rows
        return [
            draw(rows, self.num_heads) * self.score_scale,
            draw(keys, self.num_key_heads),
            draw(keys, self.num_key_heads),
            draw(rows, self.num_heads),
        ]


def attend_global(
    problem: Problem, plan: ContextPlan, tensors: Sequence[torch.Tensor], *, dense: bool = False
) -> list[torch.Tensor]:
    """Output and gradients of one process: fp64 truth, or torch's SDPA in the problem's dtype."""
    q, k, v, grad_out = (x.detach().clone() for x in tensors)
    if dense:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = dense_sdpa_attention(*leaves, plan.layout, window=problem.window)
    else:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out, _ = reference_attention(*leaves, plan.layout, window=problem.window)
    out.backward(grad_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def own_slice(plan: ContextPlan, rank: int) -> slice:
    """This rank's rows among all query rows."""
    rows = plan.layout.num_blocks // plan.cp_size * plan.layout.block_size
    return slice(rank * rows, (rank + 1) * rows)


def shard_keys(x: torch.Tensor, plan: ContextPlan, rank: int) -> torch.Tensor:
    """This rank's context rows and own rows of global keys or values."""
    context, own = x[: plan.context_length], x[plan.context_length :]
    rows = torch.from_numpy(plan.rows(rank))
    return torch.cat([context[rows], own[own_slice(plan, rank)]])


def attend_sharded(
    problem: Problem,
    plan: ContextPlan,
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """This rank's output and gradients."""
    rank = group_rank(group)
    q, k, v, grad_out = tensors
    mine = own_slice(plan, rank)
    local = [q[mine], shard_keys(k, plan, rank), shard_keys(v, plan, rank)]
    leaves = [_restride(x.clone(), problem.strided).requires_grad_() for x in local]
    out = context_parallel_attention(
        *leaves,
        plan,
        group,
        strategy=problem.comm,
        kernel=problem.kernel,
        window=problem.window,
        options=problem.options,
    )
    out.backward(_restride(grad_out[mine].clone(), problem.strided))
    return [out.detach(), *(x.grad.clone() for x in leaves if x.grad is not None)]


def _restride(x: torch.Tensor, strided: bool) -> torch.Tensor:
    """The same values with gaps between rows and with the head width not contiguous."""
    if not strided:
        return x
    rows, heads, width = x.shape
    base = x.new_full((width, rows * 2, heads + 1), torch.nan)
    view = base[:, ::2, :heads].permute(1, 2, 0)
    view.copy_(x)
    assert view.shape == (rows, heads, width)
    return view


def solve(problem: Problem, cp_size: int) -> list[torch.Tensor] | None:
    """On every rank of a pool: its share of the problem over the first `cp_size` ranks."""
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return None
    plan = problem.plan(cp_size)
    return attend_sharded(problem, plan, problem.tensors(plan), group)


def assemble(plan: ContextPlan, shares: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Global output and gradients from the ranks' shares."""
    out, grad_q = (torch.cat([share[i] for share in shares]) for i in (0, 1))
    return [out, grad_q, *(_assemble_keys(plan, [share[i] for share in shares]) for i in (2, 3))]


def _assemble_keys(plan: ContextPlan, shares: Sequence[torch.Tensor]) -> torch.Tensor:
    first = shares[0]
    context = first.new_full((plan.context_length, *first.shape[1:]), torch.nan)
    own = []
    for rank, share in enumerate(shares):
        num_rows = plan.num_rows(rank)
        context[torch.from_numpy(plan.rows(rank))] = share[:num_rows]
        own.append(share[num_rows:])
    return torch.cat([context, *own])
