"""Reading all files of a store, or of a run, to find what is damaged, all of it."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.prepare_job import SUMMARY_FILE, Json, read_json
from megatron_splitkv.data.shard import file_sha256
from megatron_splitkv.data.store_index import StoreFile, StoreIndex

_MAX_THREADS = 8
# What `prepare.json` says of the files beside the stores.
RECORDED = "files"

# Called with bytes read so far and bytes in all.
ByteProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Check:
    """What was found.

    Args:
        path: the store, or the run.
        num_files: files that the index lists, or `prepare.json`.
        num_bytes: their bytes, as they are listed.
        problems: a line for each damaged file, in the order of the list; empty if all is well.
        not_checked: of a run, what lies in it that no checksum is known of.
    """

    path: Path
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]
    not_checked: tuple[str, ...] = ()


def verify_store(
    path: str | os.PathLike[str], progress: ByteProgress = lambda done, total: None
) -> Check:
    """Compare every file of a store with the checksum in its index.

    Unlike ``FeatureStore(path, verify="full")``, which raises at the first damaged file, it goes on
    and names them all.

    Args:
        path: the store's folder.
        progress: told while it reads.

    Returns:
        What is wrong. A store whose index cannot be read has that one problem, and no file of it
        can be checked.
    """
    folder = Path(path)
    try:
        files = list(StoreIndex.read(folder).files(folder))
    except ConfigError as error:
        return Check(folder, 0, 0, (str(error),))
    return _check(folder, files, progress)


def verify_run_files(
    output: Path, stores: Sequence[str], progress: ByteProgress = lambda done, total: None
) -> Check:
    """Compare the files of a finished run beside its stores with the checksums in `prepare.json`.

    Args:
        output: the run folder.
        stores: names of its stores, which are checked by their own indices.
        progress: told while it reads.

    Returns:
        What is wrong, and what nothing is known of: `prepare.json` itself, what others put into the
        folder, a target that lies elsewhere, and all files of a run that was prepared before their
        checksums were recorded.
    """
    try:
        summary = read_json(output / SUMMARY_FILE)
        recorded = summary.get(RECORDED, {})
        files = [StoreFile(output / name, e["bytes"], e["sha256"]) for name, e in recorded.items()]
        target = str(summary.get("target_folder", ""))
    except (ConfigError, AttributeError, KeyError, TypeError) as error:
        incomplete = f"{output / SUMMARY_FILE} is incomplete: {error!r}"
        return Check(output, 0, 0, (str(error) if isinstance(error, ConfigError) else incomplete,))
    known = {*stores, *(name.split("/")[0] for name in recorded)}
    rest = {path.name for path in output.iterdir()} - known
    if target.startswith(".."):
        rest.add(target)
    return _check(output, files, progress, tuple(sorted(rest)))


def recorded_files(folder: Path, names: Iterable[str]) -> Json:
    """What `verify_run_files` compares with.

    Args:
        folder: that of the run, or where its files lie until it is finished.
        names: of files in it, and of folders.

    Returns:
        Bytes and SHA-256 of each file, by its path from the folder.
    """
    files = [
        file
        for name in names
        for file in sorted([folder / name, *(folder / name).rglob("*")])
        if file.is_file()
    ]
    return {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": file_sha256(file),
        }
        for file in files
    }


def _check(
    path: Path, files: Sequence[StoreFile], progress: ByteProgress, rest: tuple[str, ...] = ()
) -> Check:
    """Read the files by a few threads: one core hashes more slowly than a disk reads."""
    done, total = 0, sum(file.bytes for file in files)
    progress(done, total)
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        checks = {threads.submit(file.problem, full=True): file for file in files}
        for check in as_completed(checks):
            done += checks[check].bytes
            progress(done, total)
    found = [check.result() for check in checks]
    return Check(path, len(files), total, tuple(line for line in found if line), rest)
