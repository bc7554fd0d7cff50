"""Which physical rank gets which bundle of chunks: the one that has most of its rows already.

A plan's loads do not depend on who carries them, so the bundles may be handed out such that the
fewest context rows travel when they are redistributed, once a step.

Shape legend: P ranks, C chunks.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.row_source import RowSource


def match_ranks(
    chunk_bounds: NDArray[np.int64],
    chunk_owner: NDArray[np.int64],
    own_work: NDArray[np.int64],
    source: RowSource,
) -> NDArray[np.int64]:
    """Hand the bundles to ranks such that the fewest rows change their rank; loads stay.

    A bundle only goes to a rank with as much work of its own as the one that it was balanced for.
    Among all ways to do so none moves fewer rows; where none is better than the one at hand, that
    one stays. Deterministic. Cost grows with the pieces that source and chunks have in common and
    with the assignment of P bundles, not with the context.

    Args:
        chunk_bounds: ascending packed positions from 0 to S.
        chunk_owner: the rank of every chunk; chunks of one owner are a bundle.
        own_work: work that every rank has anyway, from the blocks that it owns; or any numbers that
            are equal where bundles may change places.
        source: where the rows are.

    Returns:
        The new owner of every chunk.

    Shape:
        chunk_bounds int64[C + 1], chunk_owner int64[C], own_work int64[P] -> int64[C].

    Raises:
        ConfigError: the source is of another context or group.

    Source:
        The "final locality matching" of Section 4.2 of the Split-KV paper; an assignment problem,
        solved exactly.
    """
    cp_size, context_length = own_work.size, int(chunk_bounds[-1])
    if source.cp_size != cp_size or source.context_length != context_length:
        raise ConfigError(
            f"the source holds {source.context_length} rows over {source.cp_size} ranks, the plan "
            f"{context_length} over {cp_size}; describe the source of this very context"
        )
    # Imported where it is used: kernels, which need plans, run without SciPy.
    from scipy.optimize import linear_sum_assignment

    common = _common_rows(chunk_bounds, chunk_owner, source)
    # One forbidden pair costs more than all rows together; to change nothing costs none of them.
    forbidden = own_work[:, None] != own_work[None, :]
    bundle, rank = linear_sum_assignment(np.where(forbidden, context_length + 1, 0) - common)
    if common[bundle, rank].sum() <= common.trace():
        return chunk_owner.copy()
    rank_of_bundle = np.empty(cp_size, dtype=np.int64)
    rank_of_bundle[bundle] = rank
    return rank_of_bundle[chunk_owner]


def _common_rows(
    chunk_bounds: NDArray[np.int64], chunk_owner: NDArray[np.int64], source: RowSource
) -> NDArray[np.int64]:
    """Rows of bundle i that rank j has, int64[P, P].

    Pieces begin wherever a chunk or a range of the source does, and lie in one of each.
    """
    common = np.zeros((source.cp_size, source.cp_size), dtype=np.int64)
    order = np.flatnonzero(source.start >= 0)  # what is below zero is padding of the tensors
    order = order[np.argsort(source.start[order])]
    start = np.union1d(source.start[order], chunk_bounds)
    length = np.diff(start)
    start = start[:-1]
    held = order[np.searchsorted(source.start[order], start, side="right") - 1]
    bundle = chunk_owner[np.searchsorted(chunk_bounds, start, side="right") - 1]
    np.add.at(common, (bundle, source.owner[held]), length)
    return common
