"""The shell scripts: what they would run on a cluster, and two nodes on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.cli import build_parser
from tests.distributed.jobs import ROOT
from tests.train.launches import parse

SET_BY_LAUNCHES = ("CUDA_DEVICE_MAX_CONNECTIONS", "MASTER_ADDR", "MASTER_PORT")
# Commands of a cluster that say what they were asked for; "python" ends there too.
STUBS = {
    "scontrol": 'test "$1 $2 $3" = "show hostnames node[3-4]"; printf "node3\\nnode4\\n"',
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        for SLURM_NODEID in 0 1; do
          export SLURM_NODEID
          [ "$SLURM_NODEID" -lt "$SLURM_JOB_NUM_NODES" ] && "$@"
        done
        exit 0
        """,
    "python": 'echo "${CUDA_DEVICE_MAX_CONNECTIONS:-unset} $*"',
}


def run_script(name: str, folder: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """The command lines, as lists of words, that a script ends in; the first word is a variable."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for command, body in STUBS.items():
        (bin_folder / command).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_folder / command).chmod(0o755)
    environment = {
        # Not what an earlier test of this process made of itself: a launched rank.
        **{k: v for k, v in os.environ.items() if k not in SET_BY_LAUNCHES},
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": "python",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "1",
        **variables,
    }
    command = ["bash", str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_two_nodes_under_slurm_start_one_job(tmp_path: Path) -> None:
    *doctors, first, second = run_script(
        "slurm_train.sh",
        tmp_path,
        SLURM_JOB_NUM_NODES="2",
        FEATURE_STORE="/shared/store",
        CHECKPOINTS="/shared/run",
    )
    assert doctors == [["unset", "-m", "megatron_splitkv", "doctor"]] * 2
    assert first[0] == "1"  # CUDA_DEVICE_MAX_CONNECTIONS
    node = first.index("--node-rank") + 1
    assert [first[node], second[node]] == ["0", "1"]
    assert first[:node] + first[node + 1 :] == second[:node] + second[node + 1 :]
    launcher, arguments = _split(first)
    expected = {"--nnodes": "2", "--nproc-per-node": "8", "--master-addr": "node3"}
    assert expected.items() <= launcher.items()
    assert launcher["--master-port"] == "23456"
    args = parse(arguments)
    assert args.save == args.load == "/shared/run"
    assert (args.feature_store, args.context_parallel_size) == ("/shared/store", 8)
    assert args.num_query_groups == 8


def test_arguments_replace_those_of_the_model(tmp_path: Path) -> None:
    (line,) = run_script(
        "train_node.sh",
        tmp_path,
        *("--num-layers", "3", "--train-iters", "7"),
        FEATURE_STORE="store",
        CHECKPOINTS="run",
        CP_SIZE="4",
        CUDA_DEVICE_MAX_CONNECTIONS="32",
    )
    assert line[0] == "32"  # not overruled: Blackwell may want another
    _, arguments = _split(line)
    args = parse(arguments)
    assert (args.num_layers, args.train_iters, args.context_parallel_size) == (3, 7, 4)
    assert not args.bf16


def _split(line: list[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options, and the arguments of our entry."""
    at = line.index("megatron_splitkv.pretrain_dflash")
    options = line[3 : at - 1]
    return dict(zip(options[::2], options[1::2], strict=True)), line[at + 1 :]


@pytest.mark.parametrize(
    ("name", "variables", "commands"),
    [
        (
            "slurm_prepare.sh",
            {"TARGET": "/models/target", "TEXT": "corpus.jsonl", "DATA": "data"},
            ["prepare", "doctor"],
        ),
        (
            "slurm_evaluate.sh",
            {
                "CHECKPOINTS": "run",
                "DRAFTER": "drafter",
                "TARGET": "/models/target",
                "PROMPTS": "prompts.jsonl",
            },
            ["doctor", "export", "evaluate"],
        ),
    ],
)
def test_what_surrounds_training(
    name: str, variables: dict[str, str], commands: list[str], tmp_path: Path
) -> None:
    """Every line is one that the console script takes."""
    lines = run_script(name, tmp_path, **variables)
    assert [line[1:3] for line in lines] == [["-m", "megatron_splitkv"]] * len(commands)
    assert [build_parser().parse_args(line[3:]).command for line in lines] == commands


@pytest.mark.parametrize("name", ["train_node.sh", "slurm_prepare.sh", "slurm_evaluate.sh"])
def test_a_forgotten_variable_is_named(name: str) -> None:
    script = ROOT / "examples" / name
    wanted = ("FEATURE_STORE", "TARGET", "CHECKPOINTS")
    environment = {k: v for k, v in os.environ.items() if k not in wanted}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert any(f"{variable}: " in done.stderr for variable in wanted)


@pytest.mark.job
def test_two_nodes_on_the_loopback_interface() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "examples/two_nodes_smoke.sh")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    iterations = [f"iteration        {i}/" for i in (1, 2, 3, 4)]
    lines = [line for line in done.stdout.splitlines() if "drafter loss:" in line]
    assert len(lines) == 4  # one rank of the two nodes logs
    assert all(want in line for want, line in zip(iterations, lines, strict=True))
    assert done.stdout.endswith("two nodes trained, saved and went on\n")
