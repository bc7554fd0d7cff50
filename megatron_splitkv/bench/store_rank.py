"""What one context-parallel rank reads of a store in an epoch, in a process of its own."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from megatron_splitkv.batch import get_batch_on_this_cp_rank
from megatron_splitkv.bench.memory import EXACT_MALLOC, PeakMemory
from megatron_splitkv.bench.store_case import PIECE_ROWS, StoreShape, feature_bits, plan_pack
from megatron_splitkv.data.packing import Pack, PackedEpochs, feature_reader
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import ContextPlan


@dataclass(frozen=True)
class RankRead:
    """One rank's epoch.

    Args:
        rank: which.
        rows: context rows that its plans gave it, over all packs.
        bytes_read: of features, as the store counted them.
        own_bytes: features of the pack of which it holds most.
        read_peak_bytes: most by which its memory grew while a batch of such a pack was read.
        step_peak_bytes: most by which it grew over a whole step of any pack: tokens, masks,
            anchors, plan and batch.
    """

    rank: int
    rows: int
    bytes_read: int
    own_bytes: int
    read_peak_bytes: int
    step_peak_bytes: int


def read_as_rank(store: Path, shape: StoreShape, rank: int) -> RankRead:
    """Run `rank_epoch` in a new process, whose memory is only its own.

    Args:
        store: its folder.
        shape: it was made of.
        rank: which.
    """
    before = {name: os.environ.get(name) for name in EXACT_MALLOC}
    os.environ.update(EXACT_MALLOC)  # a started process inherits them; this one has read its own
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(rank_epoch, store, shape, rank).result()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def rank_epoch(store: Path, shape: StoreShape, rank: int) -> RankRead:
    """Plan and read every pack of one epoch, then compare every row with what was written.

    Args:
        store: its folder.
        shape: it was made of.
        rank: which.

    Raises:
        RuntimeError: a row is not what was written, or other bytes were read than the rank's rows.
    """
    opened = FeatureStore(store)
    packing = PackedEpochs(opened.lengths, shape.max_length, shape.seed)
    items = packing.num_packs(0)
    # The first step of a process imports and allocates what stays.
    _read(opened, *plan_pack(opened, shape, packing, items - 1), rank, shape)
    opened.bytes_read = 0
    row_bytes = 2 * shape.width
    rows, own, read_peaks, step_peaks = 0, [], [], []
    for item in range(items):
        step = PeakMemory()
        pack, plan = plan_pack(opened, shape, packing, item)
        planned = step.grown()
        read = PeakMemory()
        features = _read(opened, pack, plan, rank, shape)
        read_peaks.append(read.grown())
        step_peaks.append(max(planned, read.base - step.base + read_peaks[-1]))
        own.append(features.shape[0] * row_bytes)
        rows += features.shape[0]
        bytes_read = opened.bytes_read
        _check_rows(pack, plan.row_ranges(rank), features, shape.width)
        del features
    if bytes_read != rows * row_bytes:
        raise RuntimeError(
            f"rank {rank} read {bytes_read:,} bytes of features, its {rows:,} rows have "
            f"{rows * row_bytes:,}"
        )
    largest = max(own)
    peak = max(grown for grown, size in zip(read_peaks, own, strict=True) if size == largest)
    return RankRead(rank, rows, bytes_read, largest, peak, max(step_peaks))


def _read(
    store: FeatureStore, pack: Pack, plan: ContextPlan, rank: int, shape: StoreShape
) -> torch.Tensor:
    reader = feature_reader(store, pack)
    batch = get_batch_on_this_cp_rank(
        pack, plan, rank, reader, mask_token_id=shape.meta.target.mask_token_id
    )
    return batch["context_features"]


def _check_rows(pack: Pack, row_ranges: np.ndarray, features: torch.Tensor, width: int) -> None:
    """Compare rows with `feature_bits`, piece by piece."""
    found, done = features.view(torch.uint16).numpy(), 0
    for start, stop in row_ranges.tolist():
        while start < stop:
            slot = int(np.searchsorted(pack.cu_seqlens, start, side="right")) - 1
            origin, end = pack.cu_seqlens[slot : slot + 2].tolist()
            end = min(stop, end, start + PIECE_ROWS)
            document = int(pack.document_ids[slot])
            expected = feature_bits(document, start - origin, end - origin, width)
            if not np.array_equal(found[done : done + end - start], expected):
                raise RuntimeError(
                    f"rows {start - origin} to {end - origin} of document {document} are not what "
                    "was written"
                )
            done, start = done + end - start, end
