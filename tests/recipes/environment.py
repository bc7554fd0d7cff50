"""What the tests of recipes need beyond the usual environment, and their subprocesses."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:  # its parent is missing
        return True


needs_bridge = pytest.mark.skipif(
    _missing("megatron.bridge"), reason="megatron-bridge is not installed: the extra `nemo`"
)
needs_nemo_run = pytest.mark.skipif(
    _missing("nemo_run"), reason="nemo-run is not installed: the extra `nemo`"
)


def run_python(
    *argv: str, environment: Mapping[str, str] | None = None, timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run this Python in the repository; Bridge and its stand-ins stay out of the test process.

    Args:
        *argv: its arguments.
        environment: variables that are added.
        timeout: seconds until it counts as hung.
    """
    return subprocess.run(
        [sys.executable, "-W", "ignore", *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
