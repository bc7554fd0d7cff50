"""Strategy `hypergraph`: a general partitioner weighs balance against traffic, the peer's way.

Context chunks are vertices that weigh their work. A group of query blocks is a net over the chunks
that it sees and the rank that owns it: a net that touches several ranks sends its rows to all but
its owner, which is what the km1 objective counts. Ranks are vertices too, fixed to themselves,
with the work of their own blocks.

Here to be compared with: `balanced` is more even and a thousand times as fast, and a rank may get
any number of chunks here. The partitioner, KaHyPar, is an optional package.

Shape legend: P ranks, C chunks, N blocks, G nets.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.tiles import KERNEL_TILE

_CONFIGURATION = Path(__file__).with_name("hypergraph.ini")
_SEED = 1  # any, the same on every rank
_IMBALANCE = 0.003  # what it may give away for less traffic; of many ranks it misses that
_MOST_WEIGHT = 1 << 30  # of all vertices together: it counts in 32 bits


def assign_hypergraph(
    layout: BlockLayout,
    chunk_bounds: NDArray[np.int64],
    chunk_work: NDArray[np.int64],
    own_work: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Owners of the chunks by hypergraph partitioning, deterministic.

    Args:
        layout: the blocks, a multiple of P of them.
        chunk_bounds: ascending packed positions from 0 to S.
        chunk_work: price of every chunk.
        own_work: work that every rank has anyway.

    Returns:
        Owner of every chunk; ranks may own any number.

    Shape:
        chunk_bounds int64[C + 1], chunk_work int64[C], own_work int64[P] -> int64[C].

    Raises:
        ConfigError: KaHyPar is not installed.

    Source:
        C. Jiang et al., "DCP: Addressing Input Dynamism in Long-Context Training via Dynamic
        Context Parallelism" (the model); S. Schlag et al., "High-Quality Hypergraph Partitioning"
        (KaHyPar).
    """
    kahypar = import_kahypar()
    chunks, cp_size = chunk_work.size, own_work.size
    rows, net_start, pins = _nets(layout, chunk_bounds, cp_size)
    if cp_size == 1 or rows.size == 0:
        return np.arange(chunks, dtype=np.int64) * cp_size // max(1, chunks)
    work = np.append(chunk_work, own_work)
    weight = np.maximum(1, work // -(-int(work.sum()) // _MOST_WEIGHT))

    graph = kahypar.Hypergraph(
        work.size,
        rows.size,
        net_start.tolist(),
        pins.tolist(),
        cp_size,
        rows.tolist(),
        weight.tolist(),
    )
    for rank in range(cp_size):
        graph.fixNodeToBlock(chunks + rank, rank)
    context = kahypar.Context()
    context.loadINIconfiguration(str(_CONFIGURATION))
    context.setK(cp_size)
    context.setEpsilon(_IMBALANCE)
    context.setSeed(_SEED)
    context.suppressOutput(True)
    kahypar.partition(graph, context)
    return np.array([graph.blockID(chunk) for chunk in range(chunks)], dtype=np.int64)


def _nets(
    layout: BlockLayout, chunk_bounds: NDArray[np.int64], cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Groups of neighbouring blocks of one owner and document, at most a kernel tile of rows each.

    Returns:
        (query rows, first pin, pins) of the groups that see something. Pins of a group are the
        chunks that it sees and, last, its owner: rank p is vertex C + p.

    Shape:
        rows int64[G], first pin int64[G + 1], pins int64[sum].
    """
    keep = layout.block_keep_mask
    owner = np.repeat(np.arange(cp_size), keep.size // cp_size)[keep]
    start, anchor = layout.document_starts[keep], layout.anchor_positions[keep]
    if owner.size == 0:
        return owner, np.zeros(1, dtype=np.int64), owner
    new_run = np.append(True, (np.diff(owner) != 0) | (np.diff(start) != 0))
    run_start = np.maximum.accumulate(np.where(new_run, np.arange(owner.size), 0))
    blocks = max(1, KERNEL_TILE // layout.block_size)
    group = np.flatnonzero((np.arange(owner.size) - run_start) % blocks == 0)
    rows = np.diff(np.append(group, owner.size)) * layout.block_size
    first = chunk_bounds.searchsorted(start[group], side="right") - 1
    end = chunk_bounds.searchsorted(np.maximum.reduceat(anchor, group))
    sees = first < end
    first, count = first[sees], (end - first)[sees] + 1
    net_start = np.append(0, np.cumsum(count))
    pins = np.arange(net_start[-1]) + np.repeat(first - net_start[:-1], count)
    pins[net_start[1:] - 1] = chunk_bounds.size - 1 + owner[group[sees]]
    return rows[sees], net_start, pins


def import_kahypar() -> ModuleType:
    """The optional package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import kahypar
    except ImportError:
        raise ConfigError(
            "plan strategy hypergraph needs the package KaHyPar: "
            'pip install "megatron-splitkv[hypergraph]"'
        ) from None
    module: ModuleType = kahypar
    return module
