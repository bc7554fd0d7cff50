"""Bad input ends a launch with one line and exit code 2, on every rank of a torchrun job too."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.train.launch import exit_on_config_error

ROOT = Path(__file__).resolve().parents[2]

# Rank 0 is the slowest, so a launcher that acts on the first exit would end it unheard.
SCRIPT = """
import os, sys, time
from megatron_splitkv.config import ConfigError
from megatron_splitkv.train.launch import exit_on_config_error
rank = int(os.environ["RANK"])
with exit_on_config_error():
    time.sleep(4.0 if rank == 0 else 0.0)
    raise ConfigError("--option is wrong; use another")
"""


@pytest.mark.parametrize(("local_rank", "prints"), [("0", True), ("1", False)])
def test_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: str,
    prints: bool,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # pytest may be ended
    with pytest.raises(SystemExit) as ended, exit_on_config_error():
        raise ConfigError("--option is wrong")
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("error: --option is wrong\n" if prints else "")


@pytest.mark.parametrize("speaks", [True, False])
def test_an_error_of_some_ranks_is_printed_by_the_one_that_speaks_for_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speaks: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1" if speaks else "0")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    error = ConfigError("rank 3 differs")
    error.speaker = speaks
    with pytest.raises(SystemExit), exit_on_config_error():
        raise error
    assert capsys.readouterr().err == ("error: rank 3 differs\n" if speaks else "")


def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError), exit_on_config_error():
        raise KeyError("a bug")


@pytest.mark.job
def test_every_rank_of_a_job_leaves_with_code_2(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(SCRIPT)
    job = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", str(script)),
        ],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert job.returncode != 0
    assert job.stderr.count("error: --option is wrong; use another\n") == 1
    assert job.stderr.count("exitcode  : 2 ") == 3, job.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
