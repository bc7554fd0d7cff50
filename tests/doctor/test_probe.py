"""A process that crashes, hangs or chatters never takes the doctor with it."""

import time
from pathlib import Path

import psutil
import pytest

from megatron_splitkv.doctor.probe import run_inspection
from tests.doctor import stubs

HANGING_APEX = """
import os, pathlib, subprocess, time
print("chatter", flush=True)
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({file!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""


def test_a_hanging_import_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "pids"
    stubs.write(tmp_path, {"apex/optimizers.py": HANGING_APEX.format(file=str(file))})
    begin = time.monotonic()
    answer = run_inspection("apex", timeout=15.0)
    assert answer.failure == "no answer within 15 s"
    assert time.monotonic() - begin < 60.0
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    gone, _ = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 10)
    assert all(not _is_running(pid) for pid in pids), gone


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_output_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stubs.write(tmp_path, {"apex/optimizers.py": "print('{\"parts\": 1}')"})
    answer = run_inspection("apex", timeout=300.0)
    assert answer.failure is None
    assert answer.facts["parts"]["FusedAdam"] == "ModuleNotFoundError(\"No module named 'amp_C'\")"


def test_what_raises_is_said_in_one_line() -> None:
    answer = run_inspection("loopback", "gloo", "no number", timeout=300.0)
    assert answer.failure == ("ValueError: invalid literal for int() with base 10: 'no number'")
    assert "Traceback" in answer.output
