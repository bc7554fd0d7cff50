"""Reading a whole store to find what is damaged, all of it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.store_index import StoreIndex

_MAX_THREADS = 8


@dataclass(frozen=True)
class StoreCheck:
    """What `verify_store` found.

    Args:
        path: the store.
        num_files: files that the index lists.
        num_bytes: their bytes, as the index has them.
        problems: a line for each damaged file, in the order of the index; empty if all is well.
    """

    path: Path
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]


def verify_store(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] = lambda done, total: None
) -> StoreCheck:
    """Compare every file of a store with the checksum in its index.

    Unlike ``FeatureStore(path, verify="full")``, which raises at the first damaged file, it goes on
    and names them all. Files are read by a few threads: one core hashes more slowly than a disk
    reads.

    Args:
        path: the store's folder.
        progress: called with bytes read so far and bytes in all.

    Returns:
        What is wrong. A store whose index cannot be read has that one problem, and no file of it
        can be checked.
    """
    folder = Path(path)
    try:
        files = list(StoreIndex.read(folder).files(folder))
    except ConfigError as error:
        return StoreCheck(folder, 0, 0, (str(error),))
    done, total = 0, sum(file.bytes for file in files)
    progress(done, total)
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        checks = {threads.submit(file.problem, full=True): file for file in files}
        for check in as_completed(checks):
            done += checks[check].bytes
            progress(done, total)
    found = [check.result() for check in checks]
    return StoreCheck(folder, len(files), total, tuple(line for line in found if line))
