"""A model of your own: few queries that read a long memory, each only its own stretch of it.

    torchrun --nproc-per-node 4 examples/custom_cross_attention.py

Not a drafter: Megatron's `CrossAttention` with `SplitKVCoreAttention` in its spec, and a `RowPlan`
that says who sees what. The memory is dealt out like cards and never moves; only queries do.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules

from megatron_splitkv.attention import SplitKVCoreAttention, SplitKVPackedSeqParams
from megatron_splitkv.cpu import enable_cpu_mode
from megatron_splitkv.plan import RowPlan

QUERIES, MEMORY, SPAN, HIDDEN, HEADS = 32, 4096, 300, 64, 4


def make_plan(cp_size: int) -> RowPlan:
    """Query i reads the SPAN rows before its own place; rank r holds rows r, r + P, r + 2 P, ..."""
    end = np.linspace(SPAN, MEMORY, QUERIES).astype(np.int64)
    return RowPlan(end - SPAN, end, tuple(np.arange(r, MEMORY, cp_size) for r in range(cp_size)))


class Reader(torch.nn.Module):
    """Cross-attention layers with residual connections."""

    def __init__(self, groups: ProcessGroupCollection, num_layers: int = 2) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            attention_dropout=0.0,  # split-KV has none
            context_parallel_size=groups.cp.size(),
            cp_comm_type="splitkv",
            use_cpu_initialization=True,  # the same weights on every rank
        )
        modules = CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=SplitKVCoreAttention,
            linear_proj=RowParallelLinear,
        )
        spec = ModuleSpec(module=CrossAttention, submodules=modules)
        shared = {"config": config, "cp_comm_type": "splitkv", "pg_collection": groups}
        self.layers = torch.nn.ModuleList(
            build_module(spec, layer_number=i + 1, **shared) for i in range(num_layers)
        )

    def forward(self, x: torch.Tensor, memory: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """``[own queries, 1, h]`` and ``[own memory rows, 1, h]`` -> ``[own queries, 1, h]``."""
        params = SplitKVPackedSeqParams(plan=plan)
        for layer in self.layers:
            out, bias = layer(x, None, key_value_states=memory, packed_seq_params=params)
            x = x + out + bias
        return x


def train(steps: int = 20) -> list[float]:
    """Learn the mean of what each query sees; returns the loss of every step, alike on all ranks.

    Megatron's groups must exist. The result does not depend on how many ranks share the memory.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    rank, size = groups.cp.rank(), groups.cp.size()
    plan = make_plan(size)
    torch.manual_seed(0)
    model = Reader(groups).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    memory, queries = torch.randn(MEMORY, 1, HIDDEN), torch.randn(QUERIES, 1, HIDDEN)
    seen = [memory[a:b].mean(0) for a, b in zip(plan.key_start, plan.key_end, strict=True)]
    wanted = 10 * torch.stack(seen)
    own = slice(rank * QUERIES // size, (rank + 1) * QUERIES // size)
    memory, queries, wanted = (
        x.cuda() for x in (memory[plan.key_positions[rank]], queries[own], wanted[own])
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # Sums over ranks, of losses as of gradients: Megatron's DDP does that in a real training.
        loss = (model(queries, memory, plan) - wanted).square().sum() / (QUERIES * HIDDEN)
        loss.backward()
        for x in (total := loss.detach().clone(), *(p.grad for p in model.parameters())):
            dist.all_reduce(x, group=groups.cp)
        optimizer.step()
        losses.append(float(total))
    return losses


def main() -> None:
    """One job whose ranks all share one memory."""
    if enable_cpu_mode():  # there is no GPU
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {len(losses)} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
