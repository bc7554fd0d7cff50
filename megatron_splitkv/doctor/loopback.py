"""Two processes of this machine exchange small tensors by the collectives that training uses.

Rank 0 is started by `probe`; it opens a store on the loopback interface and starts rank 1. With
NCCL each rank has a GPU of its own, because NCCL refuses two ranks on one; where there is only one
GPU the group has one rank.
"""

import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=60)
_ROWS = 257  # odd, and more than fits into one packet


def loopback(backend: str, world_size: str) -> dict[str, Any]:
    """Start the other rank, take part as rank 0, and wait for it.

    Args:
        backend: ``gloo`` or ``nccl``.
        world_size: 1 or 2.

    Returns:
        Backend, number of ranks and the seconds that the collectives took.

    Raises:
        RuntimeError: a rank failed, or got other numbers than it should.
    """
    import torch.distributed as dist

    store = dist.TCPStore(_HOST, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    size = int(world_size)
    others = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, backend, str(rank), str(size), str(store.port)]
        )
        for rank in range(1, size)
    ]
    try:
        seconds = exchange(backend, 0, size, store)
        for rank, process in enumerate(others, start=1):
            if code := process.wait(_TIMEOUT.total_seconds()):
                raise RuntimeError(f"rank {rank} ended with code {code}")
    finally:
        for process in others:
            process.kill()  # it would wait for this rank
    return {"backend": backend, "ranks": size, "seconds": round(seconds, 3)}


def exchange(backend: str, rank: int, size: int, store: Any) -> float:
    """One rank's part: every collective once, its result checked exactly.

    Args:
        backend: ``gloo`` or ``nccl``.
        rank: this process's.
        size: number of ranks.
        store: where the ranks find each other.

    Returns:
        Seconds of the collectives, the connections that the first of them makes included.
    """
    import torch
    import torch.distributed as dist

    from megatron_splitkv import comm

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    begin = time.perf_counter()
    ranks = torch.arange(size, device=device, dtype=torch.float32)
    rows = torch.arange(_ROWS, device=device, dtype=torch.float32)
    every = rows + 1000 * ranks[:, None]  # what each rank holds

    total = every[rank].clone()
    dist.all_reduce(total)  # this one also in a group of one
    _check("all-reduce", total, every.sum(0))
    largest = comm.all_reduce_max(every[rank], group, label="doctor")
    _check("all-reduce", largest, every[-1])
    gathered = comm.launch_gather_rows(every[rank], group, label="doctor").wait()
    _check("all-gather", gathered, every.flatten())
    # Rank r sends each rank what that one holds, plus r.
    received = comm.launch_all_to_all(every + rank, group, label="doctor").wait()
    _check("all-to-all", received, every[rank] + ranks[:, None])
    seconds = time.perf_counter() - begin
    dist.destroy_process_group()
    return seconds


def _check(name: str, found: Any, expected: Any) -> None:
    if not bool((found == expected).all()):
        raise RuntimeError(f"{name} returned other numbers than were sent")


def _main(backend: str, rank: str, size: str, port: str) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(_HOST, int(port), is_master=False, timeout=_TIMEOUT)
    exchange(backend, int(rank), int(size), store)


if __name__ == "__main__":
    _main(*sys.argv[1:])
