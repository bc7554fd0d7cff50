"""Which Megatron these tests run with: every process imports the one that the stage is about."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv import compat
from megatron_splitkv.testing import gloo_pool

ROOT = Path(__file__).parents[1]
PINNED = re.findall(r"^megatron-core==(.*)$", (ROOT / "tools/constraints.txt").read_text(), re.M)[0]
# tools/test.sh sets it where it tests with the oldest supported Megatron.
EXPECTED = os.environ.get("SPLITKV_EXPECTED_MEGATRON", PINNED)


def _megatron() -> tuple[str, str]:
    """Version and file of the megatron-core of this process."""
    core = importlib.import_module("megatron.core")
    return core.__version__, core.__file__


def test_this_process_has_the_expected_megatron() -> None:
    version, file = _megatron()
    assert version.split("+")[0] == EXPECTED
    assert Path(file).is_relative_to(sys.prefix), file
    assert compat.megatron_core_version() == version
    compat.check_environment()


def test_ranks_of_a_pool_have_it_too() -> None:
    assert set(gloo_pool(2).run(_megatron)) == {_megatron()}


@pytest.mark.parametrize("cwd", ["/", str(ROOT)])
def test_scripts_of_any_folder_have_it_too(cwd: str) -> None:
    """And this package, from wherever they run."""
    code = (
        "import importlib.metadata as m, importlib.util as u, megatron_splitkv\n"
        "print(m.version('megatron-core'), u.find_spec('megatron.training').origin)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == EXPECTED
    assert Path(file).is_relative_to(sys.prefix)
