"""The launcher's dry runs: the very command and script that would be started."""

import re
from pathlib import Path

from tests.recipes.environment import needs_nemo_run, run_python

pytestmark = needs_nemo_run

LAUNCH = "examples/nemo_run_launch.py"
OVERRIDES = ("dataset.feature_store=/data/train", "train.train_iters=20")


def _shown(tmp_path: Path, *argv: str) -> str:
    """What a dry run prints, without the spaces and line breaks of its narrow table."""
    environment = {"NEMORUN_HOME": str(tmp_path), "COLUMNS": "400"}
    process = run_python(LAUNCH, *argv, "--dryrun", *OVERRIDES, environment=environment)
    assert process.returncode == 0, process.stderr[-4000:]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    return re.sub(r"\s+", " ", process.stdout + process.stderr)


def test_a_local_job_is_torchrun_on_this_machine(tmp_path: Path) -> None:
    shown = re.sub(r"[ ',]", "", _shown(tmp_path, "qwen3.5-27b", "--gpus", "4"))
    assert "--nproc-per-node4" in shown
    assert "-mmegatron_splitkv.recipes.pretrainqwen3.5-27b" + "".join(OVERRIDES) in shown
    assert "CUDA_DEVICE_MAX_CONNECTIONS:1" in shown


def test_a_slurm_job_has_one_torchrun_a_node(tmp_path: Path) -> None:
    shown = _shown(
        tmp_path,
        *("qwen3-8b", "--executor", "slurm", "--account", "team", "--partition", "gpu"),
        *("--nodes", "4", "--container-image", "image", "--mount", "/data:/data"),
    )
    for line in ("--account=team", "--partition=gpu", "--nodes=4", "--gpus-per-node=8"):
        assert f"#SBATCH {line} " in shown
    assert "#SBATCH --ntasks-per-node=1 " in shown
    assert "--container-image image " in shown
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in shown
    assert "torchrun --rdzv-backend c10d --rdzv-endpoint $head_node_ip:" in shown
    assert "--nnodes 4 --nproc-per-node 8 " in shown
    assert "-m megatron_splitkv.recipes.pretrain qwen3-8b " + " ".join(OVERRIDES) in shown


BAD = {
    "recipe 'llama' is not known": ("llama",),
    "--executor 'cloud' is not known": ("qwen3-8b", "--executor", "cloud"),
    "--account is missing": ("qwen3-8b", "--executor", "slurm"),
    "--nodes 2 needs --executor slurm": ("qwen3-8b", "--nodes", "2"),
}
EACH = """
import sys
from examples.nemo_run_launch import main
for argv in {launches}:
    try:
        main([*argv, "--dryrun"])
    except SystemExit as leaving:
        assert leaving.code == 2
    else:
        raise AssertionError(argv)
"""


def test_bad_launches_end_with_one_line() -> None:
    process = run_python("-c", EACH.format(launches=list(BAD.values())))
    assert process.returncode == 0, process.stderr
    lines = process.stderr.splitlines()
    assert len(lines) == len(BAD)
    for line, message in zip(lines, BAD, strict=True):
        assert line.startswith(f"error: {message}")
