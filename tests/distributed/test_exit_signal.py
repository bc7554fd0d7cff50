"""`--exit-signal-handler`: a run that is told to end finishes its step, saves, and can go on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.export.checkpoint import find_iteration, read_model_tensors
from tests.distributed.jobs import DRAFTER, ROOT
from tests.train.launches import TINY_DRAFTER, make_store

pytestmark = pytest.mark.job


def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    checkpoints = tmp_path / "checkpoints"
    command = [
        *(sys.executable, *DRAFTER, *TINY_DRAFTER, "--feature-store", str(tmp_path / "store")),
        *("--train-iters", "1000000", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--save", str(checkpoints), "--save-interval", "1000000", "--exit-signal-handler"),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if "iteration        3/" in line:
                process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)
    finally:
        process.kill()
        process.wait()
    output = "".join(seen)
    assert process.returncode == 0, output[-6000:]
    assert "exiting program after receiving SIGTERM" in output
    iteration = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= iteration < 1000
    assert read_model_tensors(find_iteration(checkpoints, iteration))
