"""Rows a second: the store's positioned reads and a raw memory mapping, on the same rows."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_splitkv.bench.store_case import StoreShape, planned_packs
from megatron_splitkv.data.packing import Pack, feature_reader
from megatron_splitkv.data.shard import ShardLayout
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import StoreIndex


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReadSpeed:
    """Seconds of whole epochs of reads, all ranks one after the other.

    Args:
        state: ``cached``: the files are in the page cache, and seconds are those that the processor
            worked, which other load does not stretch; ``cold``: the files were dropped from the
            cache before every read, and seconds are those that passed.
        rows: of an epoch.
        store_seconds: an epoch each, of `feature_reader`.
        mapping_seconds: likewise, of a raw ``np.memmap``.
    """

    state: str
    rows: int
    store_seconds: tuple[float, ...]
    mapping_seconds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Rows a second of the store over those of the mapping, medians of the epochs."""
        return float(np.median(self.mapping_seconds) / np.median(self.store_seconds))

    def rows_per_second(self, seconds: Sequence[float]) -> float:
        """Of the median epoch."""
        return self.rows / float(np.median(seconds))


def read_speed(
    folder: Path,
    shape: StoreShape,
    state: str,
    epochs: int,
    progress: Callable[[int, int], None],
) -> ReadSpeed:
    """Time both ways on the row ranges of every rank and pack, in turns that alternate.

    The mapping has it easy: where each range lies in its file is worked out before its clock runs,
    and nothing is checked. Both fill a new array.

    Args:
        folder: of the store.
        shape: it was made of.
        state: ``cached`` or ``cold``.
        epochs: timed epochs.
        progress: called with packs read and packs in all.
    """
    store, index = FeatureStore(folder), StoreIndex.read(folder)
    files = [file.path for file in index.files(folder)]
    layouts = index.layouts()
    counts = [len(shard.lengths) for shard in index.shards]
    first_document = np.cumsum([0, *counts])
    row_start = np.concatenate([np.cumsum([0, *s.lengths])[:-1] for s in index.shards])
    packs = list(planned_packs(store, shape))
    clock = time.perf_counter if state == "cold" else time.process_time
    seconds = np.zeros((epochs, 2))
    rows = 0
    for epoch in range(epochs):
        for number, (pack, plan) in enumerate(packs):
            for rank in range(shape.cp_size):
                ranges = plan.row_ranges(rank)
                segments = _segments(pack, ranges, first_document, row_start)
                shards = sorted({segment.shard for segment in segments})
                own = sum(segment.stop - segment.start for segment in segments)
                rows += own if epoch == 0 else 0
                turn = (epoch + number + rank) % 2
                for way in (turn, 1 - turn):
                    if state == "cold":
                        _drop([files[shard] for shard in shards])
                    seconds[epoch, way] += (
                        _time_store(clock, store, pack, ranges)
                        if way == 0
                        else _time_mapping(clock, files, layouts, segments, own)
                    )
            progress(epoch * len(packs) + number + 1, epochs * len(packs))
    return ReadSpeed(state, rows, *(tuple(seconds[:, way].tolist()) for way in (0, 1)))


def _segments(
    pack: Pack, row_ranges: np.ndarray, first_document: np.ndarray, row_start: np.ndarray
) -> list[Segment]:
    found = []
    for start, stop in row_ranges.tolist():
        while start < stop:
            slot = int(np.searchsorted(pack.cu_seqlens, start, side="right")) - 1
            origin, end = pack.cu_seqlens[slot : slot + 2].tolist()
            document, end = int(pack.document_ids[slot]), min(stop, end)
            shard = int(np.searchsorted(first_document, document, side="right")) - 1
            row = int(row_start[document]) - origin
            found.append(Segment(shard, row + start, row + end))
            start = end
    return found


def _time_store(
    clock: Callable[[], float], store: FeatureStore, pack: Pack, ranges: np.ndarray
) -> float:
    read = feature_reader(store, pack)
    begin = clock()
    rows = read(ranges)
    seconds = clock() - begin
    del rows  # giving memory back is no part of reading, in either way
    return seconds


def _time_mapping(
    clock: Callable[[], float],
    files: list[Path],
    layouts: list[ShardLayout],
    segments: list[Segment],
    rows: int,
) -> float:
    maps = {
        shard: np.memmap(
            files[shard],
            np.uint16,
            "r",
            layouts[shard].features_start,
            (layouts[shard].rows, layouts[shard].feature_width),
        )
        for shard in {segment.shard for segment in segments}
    }
    begin = clock()
    out, done = np.empty((rows, layouts[0].feature_width), np.uint16), 0
    for segment in segments:
        end = done + segment.stop - segment.start
        out[done:end] = maps[segment.shard][segment.start : segment.stop]
        done = end
    return clock() - begin


def _drop(files: Sequence[Path]) -> None:
    """Ask the kernel to forget its copies of files that nobody maps."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
