"""A pool of gloo ranks on one machine that many tests share.

Starting a rank costs an import of torch and Megatron; a collective costs microseconds. So both are
imported once, in a server from which all ranks are forked, the ranks of a test file are started
once, and every test sends them a function to run.
"""

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
import torch.distributed as dist

# What ranks are forked with; what is not installed is passed over.
_PRELOADED = ["torch", "torch.distributed", "megatron.training"]
# Time that the other ranks get to finish (or to fail too) once one rank has failed.
_GRACE_SECONDS = 3.0
_STARTUP_SECONDS = 300.0


class GlooPool:
    """`world_size` processes in one default gloo group, waiting for functions to run.

    A pool that saw a failure is closed, because a rank that raised may have left the others inside
    a collective; the next `run` starts fresh ranks.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call `fn(*args)` on every rank and wait for all of them.

        Args:
            fn: a module-level function (it travels by name); its module must be importable.
            *args: arguments, the same for every rank; they and the results travel by pickle.
            timeout: seconds until the ranks count as hung.

        Returns:
            The result of each rank, in rank order.

        Raises:
            RuntimeError: a rank raised or died; the message holds each failure's traceback.
            TimeoutError: a rank did not answer in time; all ranks have been ended.
        """
        payload = pickle.dumps((fn, args))
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send_bytes(payload)
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks and whatever they started; harmless when there are none."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            # Megatron's checkpoint writer leaves a process behind that outlives a killed parent.
            for orphan in _descendants(process.pid):
                orphan.kill()
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="splitkv-gloo-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            # Not daemonic: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(
                target=_serve, args=(theirs, store, rank, self.world_size), daemon=False
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._collect(_STARTUP_SECONDS)  # every rank reports that the group stands
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    succeeded, value = False, "the process died without a word"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items())
            raise RuntimeError(f"{len(failures)} of {self.world_size} ranks failed\n{report}")
        if pending:
            hung = sorted(pending.values())
            raise TimeoutError(f"ranks {hung} did not answer within {timeout:g} s")
        return results


def _descendants(pid: int | None) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True) if pid is not None else []
    except psutil.NoSuchProcess:
        return []


_POOLS: dict[int, GlooPool] = {}


def gloo_pool(world_size: int) -> GlooPool:
    """Return the pool of that size which all tests of this process share.

    Args:
        world_size: number of ranks; tests of fewer ranks take a larger pool and `subgroup`.
    """
    if world_size not in _POOLS:
        _POOLS[world_size] = GlooPool(world_size)
    return _POOLS[world_size]


@atexit.register
def close_gloo_pools() -> None:
    """End the ranks of all pools; their next `run` starts new ones in about a second.

    For the end of a test file: every group that its tests have made keeps threads, which wake a
    hundred times a second for as long as the ranks live.
    """
    for pool in _POOLS.values():
        pool.close()


_SUBGROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def subgroup(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the process group of `ranks`, made once per process.

    Call it on every rank of the pool, members or not, in the same order: making a group is a
    collective.

    Args:
        ranks: global ranks of the members.
    """
    key = tuple(ranks)
    if key not in _SUBGROUPS:
        _SUBGROUPS[key] = dist.new_group(list(key))
    return _SUBGROUPS[key]


def _serve(connection: Connection, store: str, rank: int, world_size: int) -> None:
    """Life of one rank: join the group, then run what comes until the pipe closes."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    # A hang is the parent's to report; this timeout only ends a rank whose parent is gone.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent is gone or done; no farewell to ranks that are gone too
        try:
            fn, args = pickle.loads(payload)
            answer = pickle.dumps((True, fn(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            connection.send_bytes(answer)
        except (BrokenPipeError, ConnectionError):
            os._exit(0)
