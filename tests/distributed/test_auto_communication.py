"""The estimate of `auto` prices what travels as a replay of the run does, for every strategy."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions, choice, context_parallel_attention
from megatron_splitkv.attention.choice import estimate_layer_seconds
from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.comm.virtual_clock import Moment, VirtualClock, replay
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.testing import gloo_pool
from tests.distributed.attention_problem import Problem, own_slice, shard_keys

# All chunks of one size, blocks for all ranks: a collective's price does not hang on its rank.
EVEN = Problem(
    document_lengths=(64,),
    anchors=((9, 20, 31, 40, 44, 50, 58, 63),),
    num_heads=8,
    num_key_heads=4,
    dtype=torch.bfloat16,
    strategy="balanced",
)
# Nothing takes time but links; two nodes of two.
LINKS = replace(
    PRESETS["nvlink-400g"],
    ranks_per_node=2,
    intra_bandwidth=3e8,
    nic_bandwidth=5e7,
    dense_flops=1e30,
    attention_flops=1e30,
    call_latency=0.0,
)


def timelines(problems: list[Problem]) -> list[list[Moment]]:
    """Of forward and backward on this rank."""
    found = []
    for problem in problems:
        group, rank = dist.group.WORLD, dist.get_rank()
        plan = problem.plan(4)
        q, k, v, grad_out = problem.tensors(plan)
        local = (q[own_slice(plan, rank)], shard_keys(k, plan, rank), shard_keys(v, plan, rank))
        leaves = [x.clone().requires_grad_() for x in local]
        with VirtualClock() as clock:
            out = context_parallel_attention(
                *leaves, plan, group, strategy=problem.comm, options=problem.options
            )
            out.backward(grad_out[own_slice(plan, rank)])
        found.append(clock.moments)
    return found


def test_communication_takes_as_long_as_in_a_replay() -> None:
    problems = [
        replace(EVEN, comm=comm, block_order=choice.block_order_of((comm,)))
        for comm in CP_COMM_TYPES
    ]
    levels = [SplitKVOptions(query_cast="all", ranks_per_node=n) for n in (1, 2)]
    problems = [replace(problems[0], options=options) for options in levels] + problems[1:]
    of_ranks = gloo_pool(4).run(timelines, problems)
    for i, problem in enumerate(problems):
        replayed = replay([of_rank[i] for of_rank in of_ranks], LINKS, pace={"": 0.0}).seconds
        plan = problem.plan(4)
        assert len({plan.num_rows(rank) for rank in range(4)}) == 1
        two_levels = problem.options.ranks_per_node == 2
        shape = LayerShape(
            query_rows=0,
            context_rows=0,
            cp_size=4,
            heads=problem.num_heads,
            kv_heads=problem.num_key_heads,
            head_width=problem.head_width,
            hidden_size=0,
            itemsize=problem.dtype.itemsize,
            node_ranks=2 if two_levels else 1,
        ).with_plan(plan, "all", 2)
        with mock.patch.object(choice, "HOP_BYTE_SECONDS", 0.0):
            estimate_layer_seconds.cache_clear()
            estimated = estimate_layer_seconds(problem.comm, shape, LINKS, problem.options)
        estimate_layer_seconds.cache_clear()
        assert estimated == pytest.approx(replayed, rel=1e-6), problem.comm
