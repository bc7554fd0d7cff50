"""Seconds of one training step of a drafter under a method, part by part.

What is assumed, beside the fitted constants:
- bf16 tensors; backward of attention costs 2.5 times its forward; nothing is recomputed.
- Loops over ranks keep step: a hop takes as long as its busiest rank and hides no transfer.
- Split-KV's gather travels behind the key and value projections, its last scatter behind their
  backward; nothing else is hidden.
- Parameters are sharded over the CP ranks (FSDP2, as in the paper): bf16 weights are gathered
  forward and backward, fp32 gradients reduce-scattered, none of it hidden. Embedding and head, the
  target's, are whole on every rank.
- A kernel computes tiles of 128 rows, one per multiprocessor at a time.
"""

import math
from dataclasses import dataclass, replace

from megatron_splitkv.attention.strategies.volumes import TrafficShape, volume
from megatron_splitkv.attention.transfers import node_ranks
from megatron_splitkv.comm.links import Links
from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.plan.tiles import KERNEL_TILE
from megatron_splitkv.scale.constants import Constants
from megatron_splitkv.scale.dense import Dense, dense_flops
from megatron_splitkv.scale.methods import Method
from megatron_splitkv.scale.transfers import exposed_seconds, move_seconds
from megatron_splitkv.scale.work import most_work, pair_work, query_cast, total_work
from megatron_splitkv.scale.workload import Workload

_BACKWARD = 2.5
_ITEM = 2
_MULTIPROCESSORS = 128
_LAUNCH_SECONDS = 50e-6  # of an attention call with its merge, forward or backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        dense: matrix products outside attention.
        attention: kernels, as the slowest rank of each step sees them.
        communication: of all layers, that no computation hides.
        parameters: weights gathered, gradients reduced.
        redistribution: of context rows, once a step.
    """

    dense: float
    attention: float
    communication: float
    parameters: float
    redistribution: float

    @property
    def total(self) -> float:
        """All together."""
        return (
            self.dense + self.attention + self.communication + self.parameters + self.redistribution
        )


def supports(method: Method, drafter: DFlashConfig, cp_size: int) -> bool:
    """Whether the method runs: Ulysses needs a P that divides the query heads."""
    return method.strategy != "a2a" or drafter.num_attention_heads % cp_size == 0


def step_seconds(
    method: Method, workload: Workload, drafter: DFlashConfig, links: Links, constants: Constants
) -> StepTime:
    """Predict one step.

    Args:
        method: one of `methods.METHODS`.
        workload: of the step.
        drafter: shapes.
        links: the machine, its speeds of computation included.
        constants: how hops fare; its speeds of computation are those of `links` only where the
            caller has put them there (`Constants.on`).

    Raises:
        ConfigError: the method does not run at this P.
    """
    if not supports(method, drafter, workload.cp_size):
        raise ConfigError(
            f"Ulysses at P = {workload.cp_size}: P must divide the {drafter.num_attention_heads} "
            "query heads"
        )
    dense = _dense(method, workload, drafter, links)
    key_seconds = dense.keys / links.dense_flops
    return StepTime(
        dense=dense.total / links.dense_flops,
        attention=_attention(method, workload, drafter, links, constants),
        communication=_communication(
            method, workload, drafter, links, constants, key_seconds / drafter.num_layers
        ),
        parameters=_parameters(drafter, links, workload.cp_size),
        redistribution=_redistribution(method, workload, drafter, links),
    )


def _attended(method: Method, workload: Workload, links: Links) -> float:
    if method.group_cast:
        return query_cast(workload, method.plan, links.ranks_per_node).attended
    return workload.query_rows


def _dense(method: Method, workload: Workload, drafter: DFlashConfig, links: Links) -> Dense:
    context = workload.context_rows / workload.cp_size
    own = workload.query_rows / workload.cp_size
    repeated = _attended(method, workload, links)
    is_ours = method.strategy == "splitkv"
    return dense_flops(
        drafter,
        context_rows=context,
        key_rows=math.ceil((context + own) / method.bucket) * method.bucket,
        own_queries=own,
        projected_queries=repeated if is_ours and method.gather == "hidden" else own,
        projected_outputs=repeated if is_ours and method.scatter == "proj" else own,
    )


def call_efficiency(rows: float, keys: float, heads: float) -> float:
    """Share of a kernel's speed that one call of this size reaches, by whole tiles and occupancy.

    Args:
        rows: query rows of the call.
        keys: that they see at most.
        heads: query heads.
    """
    row_tiles, key_tiles = math.ceil(rows / KERNEL_TILE), math.ceil(keys / KERNEL_TILE)
    filled = rows * keys / (row_tiles * key_tiles * KERNEL_TILE**2)
    return filled * min(1.0, row_tiles * heads / _MULTIPROCESSORS)


def _attention(
    method: Method,
    workload: Workload,
    drafter: DFlashConfig,
    links: Links,
    constants: Constants,
) -> float:
    ranks, heads = workload.cp_size, drafter.num_attention_heads
    shard, own = workload.context_rows / ranks, workload.query_rows / ranks
    calls, slowdown, rows, keys = 1, 1.0, float(workload.query_rows), shard
    if method.strategy == "a2a":
        heads //= ranks
        forward = backward = float(total_work(workload))
        keys = workload.context_rows
    elif method.strategy == "splitkv":
        forward = backward = float(most_work(workload, method.plan))
        rows = _attended(method, workload, links)
    elif method.strategy == "all_gather":
        forward = backward = float(pair_work(workload, method.plan).query_owners)
        rows, keys = own, workload.context_rows
    else:
        work = pair_work(workload, method.plan)
        calls, rows = ranks, own
        slowdown = 1.0 if method.strategy == "ringx" else constants.hop_slowdown
        forward = backward = float(work.hops)
        if method.strategy == "ringx":
            forward, backward = float(work.query_turns), float(work.key_turns)
    per_pair = 4 * heads * drafter.head_dim / links.attention_flops
    efficiency = call_efficiency(rows, keys, heads)
    pairs = forward + _BACKWARD * backward
    seconds = pairs * per_pair * slowdown / efficiency + 2 * calls * _LAUNCH_SECONDS
    return drafter.num_layers * seconds


def traffic_shape(
    method: Method, workload: Workload, drafter: DFlashConfig, node_ranks: int = 1
) -> TrafficShape:
    """What the volume formulas read.

    Args:
        method: a strategy and what travels.
        workload: of the step.
        drafter: shapes.
        node_ranks: of `splitkv` and its returns to all ranks, see `TrafficShape`.
    """
    return TrafficShape(
        query_rows=workload.query_rows,
        context_rows=workload.context_rows,
        cp_size=workload.cp_size,
        heads=drafter.num_attention_heads,
        kv_heads=drafter.num_key_value_heads,
        head_width=drafter.head_dim,
        itemsize=_ITEM,
        hidden_size=drafter.hidden_size,
        gather=method.gather,
        scatter=method.scatter,
        query_cast="group" if method.group_cast else "all",
        node_ranks=1 if method.group_cast else node_ranks,
    )


def _communication(
    method: Method,
    workload: Workload,
    drafter: DFlashConfig,
    links: Links,
    constants: Constants,
    key_seconds: float,
) -> float:
    ranks = workload.cp_size
    if ranks == 1:
        return 0.0
    shape = traffic_shape(method, workload, drafter, node_ranks(links, ranks))
    cast = None
    if method.group_cast:
        cast = query_cast(workload, method.plan, links.ranks_per_node)
        everywhere = workload.query_rows * (ranks - 1) / ranks
        shape = replace(shape, query_share=(cast.intra + cast.inter) / everywhere)
    moved = volume(method.strategy, shape, published=method.published)
    # One part of the projection's time lies forward, two backward.
    hidden = (
        (moved.forward, method.gather, key_seconds / 3),
        (moved.backward, f"grad_{method.gather}", 2 * key_seconds / 3),
    )
    seconds = 0.0
    for traffic, label, behind in hidden:
        times = [
            move_seconds(move, links, ranks, constants.hop_byte_seconds, cast)
            for move in traffic.moves
        ]
        hides = label if method.strategy == "splitkv" else ""
        seconds += exposed_seconds(traffic, times, hides, behind)
    return drafter.num_layers * seconds


def _parameters(drafter: DFlashConfig, links: Links, ranks: int) -> float:
    weights = _ITEM * drafter.num_parameters()
    return 2 * links.all_gather_seconds(weights, ranks) + links.reduce_scatter_seconds(
        2 * weights, ranks
    )


def _redistribution(
    method: Method, workload: Workload, drafter: DFlashConfig, links: Links
) -> float:
    """Context features behind fc, forward, and their gradient on the way back."""
    if not method.redistributes:
        return 0.0
    rows = workload.context_rows / workload.cp_size
    nbytes = rows * drafter.hidden_size * _ITEM
    return 2 * links.all_to_all_seconds(nbytes, workload.cp_size)
