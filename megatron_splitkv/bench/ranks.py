"""The ranks of a benchmark: processes that it starts itself, or those of a launcher."""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_splitkv.config import ConfigError
from megatron_splitkv.testing.gloo import GlooPool

_SECONDS = 300.0  # ranks that import Megatron on a busy machine take their time


class Ranks(Protocol):
    """Processes of one group that run functions together."""

    world_size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `fn(*args)` on every rank, in rank order."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class LocalRanks:
    """Gloo processes of this machine.

    Args:
        world_size: how many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pool = GlooPool(world_size)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `Ranks`; `fn` travels by name."""
        return self._pool.run(fn, *args, timeout=_SECONDS)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class LaunchedRanks:
    """The processes that torchrun has started, this one among them; all make the same calls.

    NCCL where there is a GPU for each, gloo otherwise.
    """

    def __init__(self) -> None:
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpus else "gloo")
        self.world_size = dist.get_world_size()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `Ranks`."""
        results: list[Any] = [None] * self.world_size
        dist.all_gather_object(results, fn(*args))
        return results

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def launched_size() -> int:
    """How many processes a launcher has started, this one among them; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process among the launcher's; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def open_ranks(world_size: int) -> Ranks:
    """The launcher's ranks if there are any, else as many gloo processes.

    Args:
        world_size: how many ranks are wanted.

    Raises:
        ConfigError: the launcher has started another number.
    """
    if launched_size() == 1:
        return LocalRanks(world_size)
    if launched_size() != world_size:
        raise ConfigError(
            f"{world_size} ranks are wanted, but the launcher has started {launched_size()}"
        )
    return LaunchedRanks()
