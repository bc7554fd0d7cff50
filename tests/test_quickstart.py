"""The whole way, in small: text, target, features, two ranks of training, export, decoding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.job
def test_the_quick_start_leaves_what_it_promises(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "tools/quickstart.py", "--minutes", "0.2", "--train-iters", "4"]
    command += ["--output", str(output)]
    env = os.environ | {"COLUMNS": "200"}
    run = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "equal the target's plain greedy decoding token for token" in run.stdout

    report = json.loads((output / "report.json").read_text())
    assert set(report["accept_len"]) == {"trained", "untrained", "no_context", "ngram"}
    assert report["greedy_equal"] is True
    assert len(report["train_loss"]) == 4
    assert set(report["seconds"]) == {"prepare", "train", "export", "evaluate"}
    assert 0 <= report["imbalance"] < 1
    # A block of 8 rows that visits the other rank: q, out, dO and dq in fp32, and two statistics
    # there and one back. How many do follows from the documents of the log's last pack; the log
    # holds the mean of the two ranks.
    visits = report["bytes_per_layer"] / (0.5 * 4 * 8 * (4 * 4 * 24 + 3 * 4))
    assert visits == int(visits) > 0
    for name in ("plan.png", "training.png", "acceptance.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    for name in ("model.safetensors", "config.json"):
        assert (output / "drafter" / name).is_file()

    again = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert again.returncode == 0
    assert again.stdout.count("not run again") == 4

    # Another length is another run from training on: its predecessor's checkpoints must not stay.
    command[command.index("--train-iters") + 1] = "3"
    other = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert other.returncode == 0, other.stdout[-4000:]
    assert other.stdout.count("not run again") == 1
    assert other.stdout.count("it is of another run") == 3
    assert len(json.loads((output / "report.json").read_text())["train_loss"]) == 3
