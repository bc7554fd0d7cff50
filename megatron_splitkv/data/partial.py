"""Files written aside, under names of their own, until they are whole.

Several processes may write into one folder, and any of them may be killed. A partial file is
locked while its writer lives (the kernel drops the lock with the process), so what a killed writer
left can be told from what another one is writing.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import BinaryIO

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.shard import PARTIAL_SUFFIX, publish, write_at

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
    with open_partial(path) as file:
        try:
            write_at(file.fileno(), 0, memoryview(content))
            yield
            publish(file, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write_aside(path: Path, content: bytes) -> None:
    """Write a whole file so that it never carries its name half written."""
    with written_aside(path, content):
        pass


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

    Args:
        folder: what is written into.
        what_then: what to do once there is room.
        bytes_to_come: bytes that are still to be written, asked for when the disk is full and the
            caller has removed what it could not finish. If more are free, a quota is the limit, and
            no number is given.

    Raises:
        ConfigError: the disk is full, or a quota is used up.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        needed, free = bytes_to_come(), disk_usage(folder).free
        room = f"at least {needed - free:,} bytes" if needed > free else "room"
        raise ConfigError(
            f"no space left in {folder} ({error.strerror}): {free:,} bytes are free"
            f"{f', {needed:,} are still to be written' if needed else ''}; free {room}, then "
            f"{what_then}"
        ) from error
