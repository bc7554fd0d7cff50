"""`splitkv doctor` as a person and a program call it: exit codes, the table, the JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv.cli import doctor as cli_doctor
from megatron_splitkv.cli import main
from megatron_splitkv.doctor import Diagnosis, Finding, Status, diagnosis, packages
from megatron_splitkv.doctor.probe import Answer
from megatron_splitkv.testing.synthetic import make_synthetic_store
from tests.doctor import stubs

AREAS = ["packages", "device", "attention kernels", "communication", "files"]


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_synthetic_store(tmp_path / "train", [40, 31])
    code = main(["doctor", "--json", "--feature-store", str(tmp_path / "train")])
    report = json.loads(capsys.readouterr().out)
    problems = [f for f in report["findings"] if f["status"] == "problem"]
    assert not problems
    assert code == 0
    assert report["healthy"]
    assert list(dict.fromkeys(f["area"] for f in report["findings"])) == AREAS
    facts = report["facts"]
    assert {"environment", "megatron", "kernels", "gloo"} <= facts.keys()
    assert facts[f"feature store {tmp_path / 'train'}"]["documents"] == 2


def test_every_fault_has_a_red_line_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformer Engine that ends its process, half an apex, no network, no checkpoint."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.setenv("COLUMNS", "200")
    stubs.write_transformer_engine(tmp_path, source="import os; os.abort()")
    stubs.write_apex(tmp_path, ("apex/optimizers/__init__.py",))
    code = main(["doctor", "--timeout", "300", "--checkpoint", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 1
    red = [line.split("│")[2].strip() for line in output.splitlines() if "│ problem" in line]
    assert red[:3] == ["megatron-core", "transformer-engine", "gloo"]
    assert red[3].startswith("checkpoint")
    assert output.count("-> ") >= len(red)
    assert f"{len(red)} problem(s)" in output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--feature-store", "no/such"], "there is no folder no/such"),
        (["--checkpoint", "no/such"], "there is no folder no/such"),
        (["--timeout", "0"], "--timeout 0.0 must be more than 0 seconds"),
        (["--timeout", "nan"], "--timeout nan must be more than 0 seconds"),
    ],
)
def test_bad_input(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_without_torch_there_is_one_red_line(tmp_path: Path) -> None:
    """The doctor itself needs none, so that it can say so."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is missing')")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_splitkv", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    python, torch = json.loads(done.stdout)["findings"]
    assert (python["subject"], python["status"]) == ("python", "ok")
    assert (torch["subject"], torch["status"]) == ("torch", "problem")
    assert "libtorch.so is missing" in torch["detail"]


def test_nccl_is_tried_where_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def answer(*call: str, timeout: float) -> Answer:
        calls.append(call)
        return Answer({}, "not here")

    monkeypatch.setattr(diagnosis, "run_inspection", answer)
    environment: dict[str, Any] = {"importable": ["apex"], "devices": [{}]}
    assert diagnosis._inspect(environment, 1.0).keys() == {
        *("megatron", "apex", "kernels", "gloo", "nccl")
    }
    assert ("loopback", "nccl", "1") in calls  # NCCL refuses two ranks on one GPU
    environment["devices"] *= 8
    diagnosis._inspect(environment, 1.0)
    assert ("loopback", "nccl", "2") in calls


def test_a_problem_without_a_remedy_is_a_fault_of_ours() -> None:
    with pytest.raises(ValueError, match="without a fix"):
        Finding(packages.AREA, "x", Status.PROBLEM, "broken")


def test_the_table_shows_remedies_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("a", "one", Status.OK, "fine [sic]"),
        Finding("b", "two", Status.WARNING, "slow", "do this"),
    ]
    cli_doctor.print_diagnosis(Diagnosis(findings))
    output = capsys.readouterr().out
    for said in ("fine [sic]", "-> do this", "0 problem(s), 1 warning(s): all that is needed"):
        assert said in output
