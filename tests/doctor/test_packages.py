"""Transformer Engine and apex absent, present, too old and broken, as a process really finds them.

The stand-ins lie on PYTHONPATH of the processes that `probe` starts.
"""

import tomllib
from pathlib import Path

import pytest

from megatron_splitkv import compat
from megatron_splitkv.doctor import Finding, Status, packages
from megatron_splitkv.doctor.probe import Answer, run_inspection
from tests.doctor import stubs

TIMEOUT = 120.0
H100 = [{"name": "H100", "capability": [9, 0], "gigabytes": 80.0}]


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules are found first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def transformer_engine() -> Finding:
    answer = run_inspection("transformer_engine", timeout=TIMEOUT)
    return packages.transformer_engine_finding(True, answer, H100)


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for name, oldest in packages._OLDEST.items():
        assert any(
            line.startswith(name) and line.endswith(">=" + ".".join(map(str, oldest)))
            for line in wanted
        ), name
    assert any(packages._INSTALL["megatron-core"] == f"pip install '{line}'" for line in wanted)
    first, unknown = packages._PYTHON
    assert project["requires-python"] == ">={}.{},<{}.{}".format(*first, *unknown)


def test_torch_and_its_companions_too_old_or_absent() -> None:
    environment = {
        "torch": {"version": "2.7.1+cu128"},
        "packages": {"numpy": "1.26.0", "safetensors": None, "psutil": None, "triton": None},
        "devices": [],
    }
    found = {f.subject: f for f in packages.version_findings(environment)}
    assert {name: f.status for name, f in found.items()} == {
        "torch": Status.PROBLEM,
        "numpy": Status.OK,
        "safetensors": Status.PROBLEM,
        "psutil": Status.PROBLEM,
        "triton": Status.NOTE,
    }
    assert found["torch"].fix == "pip install 'torch>=2.8'"
    environment["devices"] = H100
    assert packages.version_findings(environment)[-1].status is Status.PROBLEM


# Transformer Engine


@pytest.mark.parametrize(
    ("devices", "status"),
    [([], Status.NOTE), (H100, Status.WARNING), ([{"capability": [8, 0]}], Status.NOTE)],
)
def test_transformer_engine_absent(devices: list[dict[str, object]], status: Status) -> None:
    finding = packages.transformer_engine_finding(False, Answer({}), devices)
    assert finding.status is status
    assert (finding.fix is not None) == (status is Status.WARNING)


def test_transformer_engine_present(search_path: Path) -> None:
    stubs.write_transformer_engine(search_path)
    assert transformer_engine() == Finding("packages", "transformer-engine", Status.OK, "2.20.2")


def test_transformer_engine_too_old(search_path: Path) -> None:
    """By its version, however well it can be imported."""
    stubs.write_transformer_engine(search_path, "2.7.9")
    finding = transformer_engine()
    assert finding.status is Status.PROBLEM
    assert finding.detail == "2.7.9 is too old; 2.8 is the first"
    assert finding.fix == "pip install 'megatron-splitkv[gpu]'"


def test_transformer_engine_of_an_unknown_form(search_path: Path) -> None:
    stubs.write_transformer_engine(search_path)
    path = search_path / "transformer_engine/pytorch/cpp_extensions/fused_attn.py"
    path.write_text(path.read_text().replace("attn_scale", "scale"))
    finding = transformer_engine()
    assert finding.status is Status.PROBLEM
    assert "lacks ['attn_scale']" in finding.detail


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("raise OSError('libcuda.so.1: cannot open')", "libcuda.so.1: cannot open"),
        ("import os; os.abort()", "the process was ended by SIGABRT"),
    ],
)
def test_transformer_engine_broken(search_path: Path, source: str, detail: str) -> None:
    stubs.write_transformer_engine(search_path, source=source)
    finding = transformer_engine()
    assert finding.status is Status.PROBLEM
    assert detail in finding.detail
    assert "cannot be imported" in finding.detail
    assert finding.fix is not None
    assert "pip uninstall transformer-engine" in finding.fix


# Megatron, and what of both it takes


def megatron(has_gpu: bool = False) -> dict[str, Finding]:
    answer = run_inspection("megatron", timeout=TIMEOUT)
    return {f.subject: f for f in packages.megatron_findings(answer, has_gpu)}


def test_megatron_alone_takes_torchs_adam(search_path: Path) -> None:
    answer = run_inspection("megatron", timeout=TIMEOUT)
    version = str(compat.megatron_core_version()).partition("+")[0]
    for has_gpu, status in ((False, Status.NOTE), (True, Status.WARNING)):
        core, optimizer = packages.megatron_findings(answer, has_gpu)
        assert (core.status, core.detail) == (Status.OK, f"{version} is supported")
        assert optimizer.status is status
        assert "torch's AdamW" in optimizer.detail


def test_megatron_takes_apexs_adam(search_path: Path) -> None:
    stubs.write_apex(search_path)
    assert megatron()["optimizer"].detail == "Megatron takes apex's fused Adam"


def test_a_broken_apex_that_megatron_trips_over_is_named(search_path: Path) -> None:
    """Megatron catches an ImportError and nothing else."""
    stubs.write_apex(search_path)
    (search_path / "apex/__init__.py").write_text("raise RuntimeError('built for another CUDA')")
    (finding,) = megatron().values()
    assert finding.status is Status.PROBLEM
    assert "built for another CUDA" in finding.detail
    assert str(finding.fix).startswith("repair or uninstall apex")


def test_half_a_transformer_engine_is_not_a_missing_megatron(search_path: Path) -> None:
    stubs.write(search_path, {"transformer_engine/pytorch/unused.py": ""})
    (finding,) = megatron().values()
    assert finding.status is Status.PROBLEM
    assert "not installed" not in finding.detail
    assert str(finding.fix).startswith("repair or uninstall transformer_engine")


def test_an_unsupported_megatron_is_refused_with_its_remedy() -> None:
    refused = "megatron-core 0.16.1 is not supported; install megatron-core >= 0.18.2, < 0.20"
    (finding,) = packages.megatron_findings(Answer({"refused": refused}), False)
    assert finding.status is Status.PROBLEM
    assert finding.detail == "megatron-core 0.16.1 is not supported"
    assert finding.fix == "install megatron-core >= 0.18.2, < 0.20"


# apex


def apex(optimizer: str = "", has_te: bool = False) -> dict[str, Finding]:
    answer = run_inspection("apex", timeout=TIMEOUT)
    found = packages.apex_findings(True, answer, has_te, optimizer)
    assert [f.subject for f in found] == [f"apex: {part}" for part in packages.APEX_PARTS]
    return {f.subject.removeprefix("apex: "): f for f in found}


def test_apex_absent_is_no_fault() -> None:
    for has_te, said in ((True, "not needed"), (False, "fewer launches")):
        (finding,) = packages.apex_findings(False, Answer({}), has_te, "")
        assert finding.status is Status.NOTE
        assert said in finding.detail


def test_apex_present_says_what_each_part_gains(search_path: Path) -> None:
    stubs.write_apex(search_path)
    found = apex("apex.optimizers.FusedAdam")
    for part, finding in found.items():
        assert finding.status is Status.OK
        assert packages.APEX_PARTS[part] in finding.detail
        assert "Transformer Engine's" not in finding.detail


def test_apex_beside_transformer_engine_is_not_taken() -> None:
    answer = Answer({"parts": dict.fromkeys(packages.APEX_PARTS)})
    found = packages.apex_findings(True, answer, True, "transformer_engine.FusedAdam")
    assert ["Transformer Engine's is taken" in f.detail for f in found] == [
        True,
        True,
        False,
        False,
    ]


def test_apex_without_its_extensions_fails_where_megatron_takes_it(search_path: Path) -> None:
    """Its Python alone can be imported, and says at the first optimizer that it cannot work."""
    stubs.write_apex(search_path, tuple(name for name in stubs.ALL_APEX if "/" in name))
    found = apex("apex.optimizers.FusedAdam")
    assert [f.status for f in found.values()] == [
        Status.PROBLEM,
        Status.WARNING,
        Status.NOTE,
        Status.NOTE,
    ]
    assert "No module named 'amp_C'" in found["FusedAdam"].detail
    assert "`pip install apex` is another package" in str(found["FusedAdam"].fix)
    # Where Megatron does not take it, nothing fails.
    answer = run_inspection("apex", timeout=TIMEOUT)
    for has_te, optimizer in ((True, "transformer_engine.x"), (False, "torch.optim.adamw.AdamW")):
        statuses = {f.status for f in packages.apex_findings(True, answer, has_te, optimizer)}
        assert Status.PROBLEM not in statuses
