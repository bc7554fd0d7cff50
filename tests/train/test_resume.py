"""A checkpoint that cannot be resumed is one line before anything is loaded."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron_splitkv.config import ConfigError
from megatron_splitkv.train.resume import check_resumable

PLAIN = ("optimizer.state.exp_avg.fc.weight",)
BF16 = (*PLAIN, "optimizer.state.fp32_param.fc.weight")
DISTRIBUTED = (*PLAIN, "optimizer.state.param.fc.weight")


def write_checkpoint(
    folder: Path, optimizer: tuple[str, ...] = PLAIN, *, common_file: bool = False
) -> Path:
    """The files of Megatron's torch_dist format with one parameter; returns the data file."""
    path = folder / "iter_0000003"
    state: dict[str, Any] = {name: torch.ones(64) for name in ("fc.weight", *optimizer)}
    if not common_file:  # since 0.19
        state["common_state/shard_0_1"] = {"iteration": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text("{}")
    if common_file:
        torch.save({"iteration": 3}, path / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return path / "__0_0.distcp"


def launch(folder: Path, **changes: object) -> argparse.Namespace:
    values = {
        "load": str(folder),
        "ckpt_step": None,
        "finetune": False,
        "no_load_optim": None,
        "use_distributed_optimizer": False,
        "bf16": False,
    }
    return argparse.Namespace(**(values | changes))


def test_a_whole_checkpoint_and_a_folder_without_one_pass(tmp_path: Path) -> None:
    check_resumable(launch(tmp_path, load=None))
    check_resumable(launch(tmp_path))
    for common_file in (False, True):
        folder = tmp_path / str(common_file)
        write_checkpoint(folder, common_file=common_file)
        check_resumable(launch(folder))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    data = write_checkpoint(tmp_path)
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has .* bytes.*truncated.*--ckpt-step"):
        check_resumable(launch(tmp_path))
    data.unlink()
    with pytest.raises(ConfigError, match=r"__0_0\.distcp is missing"):
        check_resumable(launch(tmp_path))


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_the_small_files_are_checked_too(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, common_file=True)
    file = tmp_path / "iter_0000003" / name
    if name != "metadata.json":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(ConfigError, match=rf"--load .*{name}") as error:
            check_resumable(launch(tmp_path))
        assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"--load .*{name}"):
        check_resumable(launch(tmp_path))


def test_an_iteration_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no iteration 5; it has 3"):
        check_resumable(launch(tmp_path, ckpt_step=5))


@pytest.mark.parametrize(
    ("optimizer", "distributed", "bf16", "message"),
    [
        (PLAIN, False, False, None),
        (BF16, False, True, None),
        (DISTRIBUTED, True, False, None),
        (DISTRIBUTED, True, True, None),
        (PLAIN, True, False, "by the plain optimizer in fp32, this run has the distributed"),
        (DISTRIBUTED, False, True, "by the distributed optimizer, this run has the plain optimi"),
        (PLAIN, False, True, "by the plain optimizer in fp32, this run has the plain .* bf16"),
    ],
)
def test_another_kind_of_optimizer_is_named(
    tmp_path: Path, optimizer: tuple[str, ...], distributed: bool, bf16: bool, message: str | None
) -> None:
    write_checkpoint(tmp_path, optimizer)
    run = {"use_distributed_optimizer": distributed, "bf16": bf16}
    if message is not None:
        with pytest.raises(ConfigError, match=f"{message}.*--no-load-optim"):
            check_resumable(launch(tmp_path, **run))
        run["no_load_optim"] = True
    check_resumable(launch(tmp_path, **run))
