"""The entry point: a file to copy, and its help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_is_the_entry_point() -> None:
    entry = ROOT / "megatron_splitkv" / "pretrain_dflash.py"
    assert (ROOT / "examples" / "pretrain_dflash.py").read_text() == entry.read_text()


def test_help_of_the_entry_point() -> None:
    # An unknown option does not matter to who asks for help.
    shown = subprocess.run(
        [sys.executable, "-m", "megatron_splitkv.pretrain_dflash", "--help", "--num-layer", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: pretrain_dflash.py [options], which --help lists\n")
    assert "warn" not in shown.stderr.lower()
    ours = shown.stdout.split("split-KV drafter training:")[1]
    assert "--feature-store DIR" in ours
    assert "--context-parallel-size" in shown.stdout


def test_a_misspelt_option_is_refused_before_argparse_prints_its_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_splitkv.train.setup import prepare_training

    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    monkeypatch.setattr("sys.argv", ["pretrain_dflash", "--num-layer", "2", "--seq-length", "x"])
    with pytest.raises(ConfigError, match=r"^unknown option --num-layer \(closest: --num-layers, "):
        prepare_training()
    assert capsys.readouterr() == ("", "")
    # What else argparse refuses has one line of usage above it.
    monkeypatch.setattr("sys.argv", ["pretrain_dflash", "--seq-length", "x"])
    with pytest.raises(SystemExit):
        prepare_training()
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("[options], which --help lists")
    assert "--seq-length: invalid int value: 'x'" in error
