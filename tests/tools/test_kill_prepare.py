"""SIGKILL at random moments of a real command, in one process and in two."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "kill_prepare.py"


@pytest.mark.job
@pytest.mark.parametrize(
    "options", [["--processes", "1"], ["--processes", "2", "--regenerate"]], ids=["one", "two"]
)
def test_a_killed_prepare_goes_on_to_the_same_bytes(options: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--samples", "48", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 kills, " in done.stdout
    assert " equal the uninterrupted one" in done.stdout
