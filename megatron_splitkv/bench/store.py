"""A store of long and short documents: built, verified, and read by every rank for an epoch."""

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

from megatron_splitkv.bench.store_case import StoreShape, build_store
from megatron_splitkv.bench.store_rank import RankRead, read_as_rank
from megatron_splitkv.bench.store_speed import ReadSpeed, read_speed
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.data.verify import verify_store

_EPOCHS = {"cached": 5, "cold": 1}
# A benchmark's store; a real one is as large as its disk.
_MOST_BYTES = 1 << 40


@dataclass(frozen=True)
class StoreBenchmark:
    """What `bench_store` found.

    Args:
        shape: what was stored.
        tokens: of all documents.
        longest: tokens of the longest.
        packs: of an epoch.
        num_bytes: of all files that the index lists.
        shards: their number.
        build_seconds: features made up, written, synced, read back and hashed.
        verify_seconds: every checksum compared.
        ranks: what each rank read, and with how much memory.
        speeds: rows a second beside a raw mapping.
    """

    shape: StoreShape
    tokens: int
    longest: int
    packs: int
    num_bytes: int
    shards: int
    build_seconds: float
    verify_seconds: float
    ranks: tuple[RankRead, ...]
    speeds: tuple[ReadSpeed, ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        content = asdict(self)
        for speed, values in zip(self.speeds, content["speeds"], strict=True):
            values["ratio"] = speed.ratio
        return content


def bench_store(
    shape: StoreShape,
    stage: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
    folder: str | None = None,
) -> StoreBenchmark:
    """Build, verify and read a store that is removed afterwards.

    Every rank plans and reads in a process of its own, one after the other; every row is compared
    with what was written, and the bytes read with those of the rank's rows.

    Args:
        shape: what is stored.
        stage: enters what begins, by its name; gives what its progress is told to.
        folder: on whose disk the store is built; None: the system's for temporary files.

    Raises:
        ConfigError: no such folder, or a disk that is too small.
        RuntimeError: something that was read is not what was written.
    """
    lengths = shape.lengths()
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--folder {folder} is no folder; make it, or name another")
    with tempfile.TemporaryDirectory(prefix="splitkv-store-", dir=folder) as scratch:
        needed, free = int(lengths.sum()) * shape.meta.row_bytes, disk_usage(scratch).free
        if needed > min(free, _MOST_BYTES):
            raise ConfigError(
                f"the store would have {needed:,} bytes, {min(free, _MOST_BYTES):,} are to be had "
                f"in {Path(scratch).parent}; take fewer --documents or a smaller --width, or "
                "another --folder"
            )
        store, begin = Path(scratch) / "store", time.perf_counter()
        with stage("build") as progress:
            shards = build_store(store, shape, progress)
        built = time.perf_counter()
        with stage("verify") as progress:
            check = verify_store(store, progress)
        verified = time.perf_counter()
        if check.problems:
            raise RuntimeError("; ".join(check.problems))
        ranks, speeds = [], []
        with stage("plan and read") as progress:
            for rank in range(shape.cp_size):
                ranks.append(read_as_rank(store, shape, rank))
                progress(rank + 1, shape.cp_size)
        for state, epochs in _EPOCHS.items():
            with stage(f"speed, {state}") as progress:
                speeds.append(read_speed(store, shape, state, epochs, progress))
    return StoreBenchmark(
        shape,
        int(lengths.sum()),
        int(lengths.max()),
        PackedEpochs(lengths, shape.max_length, shape.seed).num_packs(0),
        check.num_bytes,
        shards,
        built - begin,
        verified - built,
        tuple(ranks),
        tuple(speeds),
    )
