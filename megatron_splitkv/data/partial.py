"""Files and folders written aside, under names of their own, until they are whole.

Several processes may write into one folder, and any of them may be killed. A partial file is
locked while its writer lives (the kernel drops the lock with the process), so what a killed writer
left can be told from what another one is writing.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import BinaryIO

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.shard import PARTIAL_SUFFIX, publish, sync, write_at

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(ConfigError):
    """A full disk, or a quota that is used up: with more room the same command goes on.

    Args:
        what: what there is no room for, and what to free.
        what_then: what to do once there is room.
    """

    def __init__(self, what: str, what_then: str) -> None:
        super().__init__(what, what_then)
        self.what = what
        self.what_then = what_then

    def __str__(self) -> str:
        return f"{self.what}, then {self.what_then}"


def open_partial(path: Path) -> BinaryIO:
    """Open a new, empty file beside `path` for writing and reading back; `publish` renames it."""
    while True:
        name = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        file = open(name, "x+b", buffering=0)  # noqa: SIM115
        # Somebody who clears the folder may have come between the two calls: then another name.
        if _locks(file, unknown=True) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


@contextmanager
def written_aside(path: Path, content: bytes) -> Iterator[None]:
    """Write a whole file before the block, and give it its name behind it.

    What the block publishes is then never without the file for want of space.
    """
    with _named(path):
        file = open_partial(path)
    with file:
        try:
            with _named(path):
                write_at(file.fileno(), 0, memoryview(content))
            yield
            with _named(path):
                publish(file, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write_aside(path: Path, content: bytes) -> None:
    """Write a whole file so that it never carries its name half written."""
    with written_aside(path, content):
        pass


@contextmanager
def folder_written_aside(folder: Path) -> Iterator[Path]:
    """A folder that the block fills; it gets its name behind the block, with all of it on the disk.

    Args:
        folder: must not be there; its parents are made.

    Yields:
        Where to write. What a killed writer left there is gone.

    Raises:
        DiskFullError: the disk is full; nothing is left.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with full_disk_explained(folder, "do it again"):
        try:
            yield partial
            # The files before their folders, and these before the new name.
            for path in [*sorted(partial.rglob("*"), reverse=True), partial]:
                sync(path)
            os.replace(partial, folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def remove_dead_partials(folder: Path, *, finished: bool = False) -> None:
    """Remove the partial files of killed writers; those of living ones stay.

    Args:
        folder: where they lie.
        finished: nobody needs a partial file any more, so that those of a file system without
            locks, where life cannot be told from death, go too.
    """
    for name in folder.glob(f"*{PARTIAL_SUFFIX}"):
        try:
            with open(name, "r+b", buffering=0) as file:
                if _locks(file, unknown=finished):
                    name.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # published or removed meanwhile


def _locks(file: BinaryIO, *, unknown: bool) -> bool:
    """Whether the lock was free and is now held; `unknown` where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return unknown
    return True


@contextmanager
def full_disk_explained(
    folder: Path, what_then: str, bytes_to_come: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Turn a full disk into one line that says what is missing.

    Of several that lie around each other, the innermost knows what was written, and the outermost
    what to do then.

    Args:
        folder: what is written into, where the error names no file.
        what_then: what to do once there is room.
        bytes_to_come: bytes that are still to be written, asked for when the disk is full and the
            caller has removed what it could not finish. If more are free, a quota is the limit, and
            no number is given.

    Raises:
        DiskFullError: the disk is full, or a quota is used up.
    """
    try:
        yield
    except DiskFullError as error:
        raise DiskFullError(error.what, what_then) from error
    except Exception as error:
        number = _full(error)
        if number is None:
            raise
        file, name = getattr(error, "filename", None), ""
        if file:
            folder, name = Path(file).parent, f" for {Path(file).name}"
        # A folder that could not be made has no free bytes, the one around it has.
        there = next(path for path in folder.absolute().joinpath("x").parents if path.is_dir())
        needed, free = bytes_to_come(), disk_usage(there).free
        room = f"at least {needed - free:,} bytes" if needed > free else "room"
        raise DiskFullError(
            f"no space left in {folder}{name} ({os.strerror(number)}): {free:,} bytes are free"
            f"{f', {needed:,} are still to be written' if needed else ''}; free {room}",
            what_then,
        ) from error


def _full(error: Exception) -> int | None:
    """The number by which an error says that the disk is full; None if it says something else."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _FULL else None
    # safetensors and tokenizers write in Rust, whose errors carry the number in their text alone.
    return next((number for number in _FULL if f"(os error {number})" in str(error)), None)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors of the system name the file that people know."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
