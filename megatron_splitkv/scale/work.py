"""Attention work from the real planner: whose queries meet whose keys, and who waits for whom."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.pair_work import PairWork
from megatron_splitkv.scale.workload import Workload

PAPER_CHUNKS = 16  # J; the paper does not say its own


@lru_cache(maxsize=256)
def plan_of(workload: Workload, strategy: str) -> ContextPlan:
    """The planner's plan; `lpt` with J = 16, contiguous shards in one piece."""
    chunks = {"lpt": PAPER_CHUNKS, "none": 1}.get(strategy)
    return build_plan(
        workload.layout(),
        workload.context_rows,
        workload.cp_size,
        strategy=strategy,
        chunks_per_rank=chunks,
    )


def most_work(workload: Workload, strategy: str) -> int:
    """Query-key pairs of the busiest rank where every rank sees all the queries that it needs."""
    return int(plan_of(workload, strategy).work.max())


def total_work(workload: Workload) -> int:
    """Query-key pairs of all ranks; no plan changes it."""
    return int(plan_of(workload, "none").work.sum())


@lru_cache(maxsize=256)
def pair_work(workload: Workload, strategy: str) -> PairWork:
    """Work of loops over ranks, under the placement of keys by `strategy`."""
    return PairWork.of_plan(plan_of(workload, strategy))


@dataclass(frozen=True)
class QueryCast:
    """Who needs whose queries, when only ranks with keys of a document attend its queries.

    Args:
        attended: query rows that the busiest rank attends, its own included.
        intra: query rows that the busiest rank sends to ranks of its node, copies counted.
        inter: the same to other nodes.
    """

    attended: int
    intra: int
    inter: int


@lru_cache(maxsize=256)
def query_cast(workload: Workload, strategy: str, ranks_per_node: int) -> QueryCast:
    """Rows of a group-cast; by documents: a rank needs all queries of a document or none."""
    plan = plan_of(workload, strategy)
    ranks, documents = plan.cp_size, workload.samples
    bounds = plan.chunk_bounds
    filled = np.flatnonzero(np.diff(bounds))
    first = bounds[filled] // workload.sample_context
    last = (bounds[filled + 1] - 1) // workload.sample_context
    holds = np.zeros((ranks, documents), dtype=np.bool_)
    for chunk, low, high in zip(filled, first, last, strict=True):
        holds[plan.chunk_owner[chunk], low : high + 1] = True
    # Query rows of each document that each rank owns.
    owner = np.repeat(np.arange(ranks), plan.num_blocks // ranks)
    document = plan.layout.document_starts // workload.sample_context
    owned = np.zeros((ranks, documents), dtype=np.int64)
    np.add.at(owned, (owner, document), plan.layout.block_keep_mask * plan.block_size)
    node = np.arange(ranks) // ranks_per_node
    per_node = np.zeros((node[-1] + 1, documents), dtype=np.int64)
    np.add.at(per_node, node, holds)
    own = (owned * holds).sum(axis=1)
    near = (owned * per_node[node]).sum(axis=1) - own
    everywhere = (owned * holds.sum(axis=0)).sum(axis=1)
    attended = (holds * owned.sum(axis=0)).sum(axis=1) + (owned * ~holds).sum(axis=1)
    return QueryCast(int(attended.max()), int(near.max()), int((everywhere - own - near).max()))
