"""How the quick start shows a training job where no bar can be drawn."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

FILE = Path(__file__).parents[2] / "tools" / "stages.py"
JOB = """
for step in (2, 4):
    print(f" iteration {step}/ 4 | x | drafter loss: 2.5E+00 | accept_len: 1.5E+00 |")
"""


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages_of_the_quick_start", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "console", Console(force_terminal=False))
    return module


@pytest.mark.parametrize("code", [0, 3])
def test_a_log_gets_lines(
    stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    command = [sys.executable, "-c", f"{JOB if code == 0 else ''}\nraise SystemExit({code})"]
    assert stages.watch_training(command, {}, tmp_path) == code
    lines = capsys.readouterr().out.splitlines()
    assert "training steps: begins" in lines
    ended = [line for line in lines if line.startswith("training steps: 4/4 done in ")]
    assert len(ended) == (code == 0)
    assert (tmp_path / "train.log").read_text().count("iteration") == (2 if code == 0 else 0)
