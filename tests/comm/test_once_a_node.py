"""One process of a node makes a check, all learn how it went."""

import os
import socket
from pathlib import Path
from unittest import mock

import pytest

from megatron_splitkv.comm import once_a_node as module
from megatron_splitkv.comm.once_a_node import once_a_node
from megatron_splitkv.config import ConfigError
from megatron_splitkv.testing import gloo_pool


def _checked(folder: Path, fault: Exception | None = None) -> str:
    """Make a check that leaves a file each time that it is made; what the rank learnt."""

    def check() -> None:
        (folder / f"by {os.getpid()}").touch()
        if fault is not None:
            raise fault

    try:
        once_a_node(check)
    except ConfigError as error:
        return str(error)
    return ""


def _launched(folder: Path, port: int, fault: Exception | None) -> str:
    """The same before torch.distributed is up; rank 0 serves the store."""
    with (
        mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(port)),
        mock.patch.object(module.dist, "is_initialized", return_value=False),
        mock.patch.object(module, "_SERVED", []),
    ):
        return _checked(folder, fault)


def _on_nodes(folder: Path, fault: Exception | None) -> str:
    """Each rank on a node of its own; the second one's check fails."""
    rank = os.environ["RANK"]
    with mock.patch.object(socket, "gethostname", return_value=f"node {rank}"):
        return _checked(folder, fault if rank == "1" else None)


def _in_attempt(attempt: int, folder: Path, fault: Exception | None) -> str:
    """The first check of a process that a launcher started, with the store of those before."""
    with (
        mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=str(attempt)),
        mock.patch.object(module, "_CHECKS", iter([1000])),
    ):
        return _checked(folder, fault)


def test_ranks_that_are_started_again_check_again(tmp_path: Path) -> None:
    fault = ConfigError("no answer")
    assert gloo_pool(2).run(_in_attempt, 0, tmp_path, fault) == ["no answer"] * 2
    assert gloo_pool(2).run(_in_attempt, 1, tmp_path, None) == ["", ""]


def test_one_process_checks_for_all(tmp_path: Path) -> None:
    assert gloo_pool(2).run(_checked, tmp_path) == ["", ""]
    assert len(list(tmp_path.iterdir())) == 1
    for fault, said in (
        (ConfigError("another target"), "another target"),
        (MemoryError(), "MemoryError"),
    ):
        assert gloo_pool(2).run(_checked, tmp_path, fault) == [said, said]


def test_ranks_meet_before_torch_distributed_is_up(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = gloo_pool(2).run(_launched, tmp_path, port, ConfigError("another target"))
    assert found == ["another target", "another target"]
    assert len(list(tmp_path.iterdir())) == 1


def test_every_node_checks_and_a_fault_on_one_is_told_on_all(tmp_path: Path) -> None:
    found = gloo_pool(2).run(_on_nodes, tmp_path, ConfigError("no such file"))
    assert found == ["no such file", "no such file"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_process_by_itself_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    made: list[int] = []
    once_a_node(lambda: made.append(1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    once_a_node(lambda: made.append(1))
    assert len(made) == 2
