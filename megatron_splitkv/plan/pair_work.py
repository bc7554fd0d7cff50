"""Whose queries meet whose keys: the work of strategies in which ranks wait for one another."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.plan.context_plan import ContextPlan


@dataclass(frozen=True)
class PairWork:
    """Query-key pairs as the slowest rank sees them, at once or step by step.

    Hops and turns keep step: nobody has the next shard before all have finished with this one.

    Args:
        total: of all ranks; no plan changes it.
        key_owners: of the rank whose keys are seen most: all queries go to the keys.
        query_owners: of the rank whose own queries see the most keys: all keys go to the queries.
        hops: sum over hops t of the most pairs between a rank and the rank t places on.
        query_turns: sum over ranks of the most pairs that one other rank has with its queries.
        key_turns: sum over ranks of the most pairs that one other rank has with its keys.
    """

    total: int
    key_owners: int
    query_owners: int
    hops: int
    query_turns: int
    key_turns: int

    @classmethod
    def of_plan(cls, plan: ContextPlan) -> Self:
        """Count a plan's pairs, in a layer of full attention."""
        pairs = pairs_by_owner(plan)
        ranks = len(pairs)
        # Column t of the view: every rank with the one t places on.
        twice = np.concatenate([pairs, pairs], axis=1)
        row, item = twice.strides
        shifted = np.lib.stride_tricks.as_strided(twice, (ranks, ranks), (row + item, item))
        return cls(
            total=int(pairs.sum()),
            key_owners=int(pairs.sum(axis=0).max()),
            query_owners=int(pairs.sum(axis=1).max()),
            hops=int(shifted.max(axis=0).sum()),
            query_turns=int(pairs.max(axis=1).sum()),
            key_turns=int(pairs.max(axis=0).sum()),
        )


def pairs_by_owner(plan: ContextPlan) -> NDArray[np.int64]:
    """Query-key pairs between the queries of one rank and the keys of another.

    Own-block keys lie with their queries.

    Shape:
        int64[P, P]: query owner, key owner.
    """
    ranks, layout = plan.cp_size, plan.layout
    owned = plan.num_blocks // ranks
    pairs = np.zeros((ranks, ranks), dtype=np.int64)
    documents = np.unique(layout.document_starts)
    ends = np.append(documents[1:], plan.context_length)
    for start, end in zip(documents, ends, strict=True):
        blocks = np.flatnonzero((layout.document_starts == start) & layout.block_keep_mask)
        if blocks.size == 0 or start == end:
            continue
        first = np.searchsorted(plan.chunk_bounds, start, side="right") - 1
        last = np.searchsorted(plan.chunk_bounds, end)
        bounds = np.clip(plan.chunk_bounds[first : last + 1], start, end)
        # Chunks in the order of their owners, so that each owner's are summed in one go.
        order = np.argsort(plan.chunk_owner[first:last], kind="stable")
        owners, at = np.unique(plan.chunk_owner[first:last][order], return_index=True)
        low, length = bounds[:-1][order], np.diff(bounds)[order]
        visible = np.clip(layout.anchor_positions[blocks, None] - low, 0, length)
        queries, of = np.unique(blocks // owned, return_index=True)
        summed = np.add.reduceat(np.add.reduceat(visible, of, axis=0), at, axis=1)
        pairs[np.ix_(queries, owners)] += plan.block_size * summed
    kept = layout.block_keep_mask.reshape(ranks, owned).sum(axis=1)
    pairs[np.arange(ranks), np.arange(ranks)] += kept * plan.block_size**2
    return pairs
