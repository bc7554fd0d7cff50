"""Which documents make which shard: data that is there before a row is computed."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError


def plan_shards(lengths: ArrayLike, row_bytes: int, max_shard_bytes: int) -> NDArray[np.int64]:
    """Cut documents, in their order, into shards of bounded size.

    A pure function of its arguments: every process that prepares a part of a store knows every
    shard's documents, and a later run knows what is missing.

    Args:
        lengths: tokens of each document, at least 1.
        row_bytes: bytes of one token on disk, `StoreMeta.row_bytes`.
        max_shard_bytes: a shard ends before it would grow beyond this. Documents are never split:
            one that is longer is a shard of its own.

    Returns:
        bounds: shard k holds the documents ``bounds[k]`` to ``bounds[k + 1]``, never none.

    Shape:
        lengths int64[D]; bounds int64[K + 1].

    Raises:
        ConfigError: an empty document.
    """
    rows = np.asarray(lengths, dtype=np.int64)
    if rows.size and rows.min() < 1:
        raise ConfigError(f"document {int(rows.argmin())} is empty; leave it out")
    ends = np.cumsum(rows) * row_bytes
    bounds = [0]
    while bounds[-1] < rows.size:
        first = bounds[-1]
        begin = ends[first - 1] if first else 0
        fitting = int(np.searchsorted(ends, begin + max_shard_bytes, side="right"))
        bounds.append(max(first + 1, fitting))
    return np.array(bounds, dtype=np.int64)
