"""A slow check that one process of each node makes for all, before there are process groups.

Ranks meet in the key-value store of the launch, where ``torch.distributed`` has them meet later; if
it is up already, in its own. A store may be waited for as long as a check takes, collectives time
out. (On each node one: it may have its own copy of a file.)
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_splitkv.config import ConfigError

_PATIENCE = timedelta(hours=4)
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Every rank makes the same checks in the same order: their numbers tell their keys apart.
_CHECKS = count()
# Where no launcher serves the store, rank 0 does, until it ends: for torch.distributed, too.
_SERVED: list[dist.Store] = []


def once_a_node(check: Callable[[], None]) -> None:
    """Make a check in one process of each node; every rank of the job learns how it went.

    Call it on every rank. A process that no launcher started makes the check by itself.

    Args:
        check: raises ConfigError where it fails.

    Raises:
        ConfigError: the check's, on every rank the same.
    """
    job = _job()
    if job is None:
        check()
        return
    store, rank, size = job
    # A launcher that starts ranks anew keeps its store: what an earlier attempt said is not ours.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"megatron_splitkv/attempt {attempt}/check {next(_CHECKS)}"
    store = dist.PrefixStore(name, store)
    if store.add(f"begun on {socket.gethostname()}", 1) == 1:
        try:
            check()
        except Exception as error:  # the others wait to hear of it, whatever it is
            store.set("failed", str(error) or type(error).__name__)
    _meet(store, "made", size)
    failed = store.get("failed").decode() if store.check(["failed"]) else ""
    _count(store, "told", size)
    if rank == 0:  # it may serve the store
        store.wait(["told by all"], _PATIENCE)
    if failed:
        raise ConfigError(failed)


def _meet(store: dist.Store, what: str, size: int) -> None:
    _count(store, what, size)
    store.wait([f"{what} by all"], _PATIENCE)


def _count(store: dist.Store, what: str, size: int) -> None:
    if store.add(what, 1) == size:
        store.set(f"{what} by all", "yes")


def _job() -> tuple[dist.Store, int, int] | None:
    """The job's store, this process's rank, and how many there are; None for one by itself."""
    if dist.is_available() and dist.is_initialized():
        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    launch = [os.environ.get(name) for name in _LAUNCH]
    if None in launch or launch[1] == "1":
        return None
    if not _SERVED:
        store, _, _ = next(iter(dist.rendezvous("env://")))
        _SERVED.append(store)
    return _SERVED[0], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
