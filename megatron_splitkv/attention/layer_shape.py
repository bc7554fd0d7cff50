"""One attention layer as its cost estimates see it: sizes, and the load that a plan makes."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_splitkv.attention.strategies.volumes import TrafficShape
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.plan.pair_work import PairWork


@dataclass(frozen=True)
class Load:
    """What a plan asks of the ranks in one layer of full attention.

    Args:
        pairs: query-key pairs.
        query_cast: ``all`` or ``group``, as the run resolves it.
        attended_rows: query rows that the busiest rank attends under split-KV, its own included.
        sent_rows: query rows that the busiest rank sends to others, copies counted.
        far_share: share of these that leaves the node.
    """

    pairs: PairWork
    query_cast: str
    attended_rows: int
    sent_rows: int
    far_share: float

    @classmethod
    def of_plan(
        cls, plan: ContextPlan, query_cast: str, ranks_per_node: int, node_ranks: int = 1
    ) -> Self:
        """Count it.

        Args:
            plan: of a micro-batch.
            query_cast: see `SplitKVOptions`.
            ranks_per_node: neighbours in rank order that share a node.
            node_ranks: see `AttentionPlan.resolve_cast`.
        """
        ranks, owned = plan.cp_size, plan.blocks_per_rank
        cast = plan.resolve_cast(query_cast, node_ranks=node_ranks)
        if cast == "all":
            needs = np.full((ranks, ranks), owned)
        else:
            needs = plan.needs().reshape(ranks, ranks, owned).sum(axis=2)  # blocks of each owner
        np.fill_diagonal(needs, owned)
        node = np.arange(ranks) // ranks_per_node
        sent = needs.sum(axis=0) - owned
        far = (needs * (node[:, None] != node)).sum(axis=0)
        busiest = int(sent.argmax())
        return cls(
            pairs=PairWork.of_plan(plan),
            query_cast=cast,
            attended_rows=int(needs.sum(axis=1).max()) * plan.block_size,
            sent_rows=int(sent[busiest]) * plan.block_size,
            far_share=float(far[busiest] / max(1, sent[busiest])),
        )


@dataclass(frozen=True)
class LayerShape:
    """What the choices for a layer depend on; heads and widths are of one tensor-parallel rank.

    Args:
        query_rows: Q of all ranks, padding blocks included.
        context_rows: S of all ranks.
        cp_size: P.
        heads: n, query heads.
        kv_heads: key and value heads.
        head_width: d of a head.
        hidden_size: width of the rows before the query projection; 0 if attention is called with
            projected tensors: then nothing travels behind a projection, or on its other side.
        itemsize: bytes of an element on the wire.
        load: of the plan; None: of one document whose anchors are spread evenly, evenly planned,
            its blocks dealt out as the strategy wants them.
        node_ranks: ranks of the group on each of several nodes, where the run returns partial
            results by two levels; 1 where by one; None: by two wherever the links have two.
    """

    query_rows: int
    context_rows: int
    cp_size: int
    heads: int
    kv_heads: int
    head_width: int
    hidden_size: int
    itemsize: int
    load: Load | None = None
    node_ranks: int | None = None

    @property
    def query_width(self) -> int:
        """Elements of a projected query row."""
        return self.heads * self.head_width

    @property
    def loaded(self) -> Load:
        """`load`, or what stands for it."""
        if self.load is not None:
            return self.load
        ranks = self.cp_size
        total = self.query_rows * self.context_rows // 2
        even = -(-total // ranks)
        own = self.query_rows // ranks
        work = PairWork(total, even, even, even, even, even)
        return Load(work, "all", self.query_rows, own * (ranks - 1), 0.0)

    def with_plan(self, plan: ContextPlan, query_cast: str, ranks_per_node: int) -> Self:
        """The same layer under a plan, with its load; see `Load.of_plan`."""
        return replace(
            self,
            query_rows=plan.num_blocks * plan.block_size,
            context_rows=plan.context_length,
            cp_size=plan.cp_size,
            load=Load.of_plan(plan, query_cast, ranks_per_node, self.node_ranks or 1),
        )

    def traffic(self, gather: str, scatter: str, node_ranks: int = 1) -> TrafficShape:
        """What the volume formulas read.

        Args:
            gather: of split-KV, ``q`` or ``hidden``.
            scatter: of split-KV, ``heads`` or ``proj``.
            node_ranks: of split-KV, see `TrafficShape`.
        """
        everywhere = self.query_rows * (self.cp_size - 1) / self.cp_size
        share = self.loaded.sent_rows / everywhere if everywhere else 1.0
        return TrafficShape(
            query_rows=self.query_rows,
            context_rows=self.context_rows,
            cp_size=self.cp_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            itemsize=self.itemsize,
            sum_itemsize=max(4, self.itemsize),
            hidden_size=self.hidden_size,
            gather=gather,
            scatter=scatter,
            query_cast=self.loaded.query_cast,
            query_share=share,
            node_ranks=node_ranks,
        )
