"""The second, small part of every query's keys: the rows of its own draft block."""

from weakref import WeakKeyDictionary

import numpy as np

from megatron_splitkv.plan import ContextPlan, Rectangles, Staircase

_STAIRCASES: WeakKeyDictionary[ContextPlan, dict[int, Staircase]] = WeakKeyDictionary()


def own_block_staircase(plan: ContextPlan, rank: int) -> Staircase:
    """Visibility of a rank's own blocks among themselves: each kept block sees its own B rows.

    A staircase of one level, so that a kernel treats these keys like any others.

    Args:
        plan: the plan of the micro-batch.
        rank: whose blocks.

    Returns:
        The staircase over the rank's own query rows and own key rows, blocks counted from the
        rank's first; built once per plan.
    """
    of_rank = _STAIRCASES.setdefault(plan, {})
    if rank not in of_rank:
        of_rank[rank] = _build(plan, rank)
    return of_rank[rank]


def _build(plan: ContextPlan, rank: int) -> Staircase:
    block_size = plan.layout.block_size
    keep = plan.layout.block_keep_mask[plan.blocks(rank)]
    kept = np.flatnonzero(keep)
    nothing = np.empty(0, dtype=np.int64)
    start = np.where(keep, np.arange(keep.size) * block_size, 0)
    pairs = kept.size * block_size**2
    return Staircase(
        levels=[Rectangles(kept, kept + 1, kept * block_size, (kept + 1) * block_size)],
        leaves=Rectangles(nothing, nothing, nothing, nothing),
        key_start=start,
        key_end=np.where(keep, start + block_size, 0),
        needed_pairs=pairs,
        executed_pairs=pairs,
    )
