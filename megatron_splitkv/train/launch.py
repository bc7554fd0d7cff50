"""How an entry point begins without noise, and how it ends when its input was bad."""

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_splitkv.config import ConfigError

_MEETING_KEY = "megatron_splitkv/config_error"
_MEETING_SECONDS = 30.0


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """On a machine without a GPU, spare the reader Megatron's regrets that it has none."""
    if torch.cuda.is_available():
        yield
        return
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a `ConfigError` of the body into one line on stderr and exit code 2.

    The first rank of each node prints the line, or the error's `speaker` where only some ranks
    found it. A launcher ends all ranks when the first one has left, so ranks that found the error
    before the process group existed wait for one another (at most half a minute), and then leave
    without heeding the launcher: every rank ends with its own exit code, and none in the middle of
    its line.

    Raises:
        SystemExit: with code 2, after a `ConfigError`.
    """
    try:
        yield
    except ConfigError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving, and soon
        first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if first_of_node if error.speaker is None else error.speaker:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not dist.is_initialized():
            _meet_other_ranks()
        sys.exit(2)


def _meet_other_ranks() -> None:
    """Wait until all ranks are here, through the store that torchrun keeps for its workers."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world_size = int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=_MEETING_SECONDS)
    # A rank without the error never comes; then leaving alone is right.
    with contextlib.suppress(dist.DistError, RuntimeError):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timeout,
        )
        if store.add(f"{_MEETING_KEY}/count", 1) == world_size:
            store.set(f"{_MEETING_KEY}/complete", "")
        store.wait([f"{_MEETING_KEY}/complete"], timeout)
