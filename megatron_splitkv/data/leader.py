"""The lock of the one process that leads a job, and the sign of life that others wait for."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_splitkv.config import ConfigError

_BEAT_SECONDS = 10.0


@contextmanager
def leading(path: Path) -> Iterator[None]:
    """Hold the leader's lock, and touch it again and again for those who wait.

    Args:
        path: the lock, in the run folder's folder of unfinished work.

    Raises:
        ConfigError: another process holds it.
    """
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(_BEAT_SECONDS):
            with suppress(FileNotFoundError):
                os.utime(path)

    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process prepares {path.parent.parent} at this moment; wait for it, or "
                "start several together with torchrun"
            ) from None
        except OSError:
            pass  # A file system without locks: nothing tells two leaders apart.
        os.utime(path)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
