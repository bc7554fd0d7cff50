"""The entry point: a file to copy, and its help."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_is_the_entry_point() -> None:
    entry = ROOT / "megatron_splitkv" / "pretrain_dflash.py"
    assert (ROOT / "examples" / "pretrain_dflash.py").read_text() == entry.read_text()


def test_help_of_the_entry_point() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "megatron_splitkv.pretrain_dflash", "--help"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0
    assert "warn" not in shown.stderr.lower()
    ours = shown.stdout.split("split-KV drafter training:")[1]
    assert "--feature-store DIR" in ours
    assert "--context-parallel-size" in shown.stdout
