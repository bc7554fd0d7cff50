"""Runs one inspection in a process of its own, which may crash or hang without harm.

The process answers into a file: what it prints, imports included, disturbs nothing.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL = 2000  # characters of a failed process's last words


@dataclass(frozen=True)
class Answer:
    """What an inspection said.

    Args:
        facts: its result; empty if it failed.
        failure: why there is none, in one line; None if there is.
        output: the end of what the process printed, for `failure`.
    """

    facts: dict[str, Any]
    failure: str | None = None
    output: str = ""


def run_inspection(name: str, *arguments: str, timeout: float) -> Answer:
    """Run a function of `megatron_splitkv.doctor.inspections`.

    Args:
        name: of the function.
        *arguments: its arguments.
        timeout: seconds until the process and all that it started are ended.
    """
    with tempfile.TemporaryDirectory(prefix="splitkv-doctor-") as folder:
        file = Path(folder, "answer.json")
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_splitkv.doctor", name, str(file), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Answer({}, f"no answer within {timeout:g} s")
        finally:
            _end_group(process)
        if process.returncode == 0:
            return Answer(json.loads(file.read_text()))
    return Answer({}, _last_words(process.returncode, output), output[-_TAIL:])


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the process and its children; those that ended by themselves are no error."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        process.wait()


def _last_words(returncode: int, output: str) -> str:
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"the process was ended by {name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with code {returncode}"
