"""The logic of the GPU script, on a CPU: it finds what is wrong, records it, and goes on."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_splitkv.attention.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/gpu_acceptance.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    path, modules = list(sys.path), set(sys.modules)
    spec = importlib.util.spec_from_file_location("gpu_acceptance", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("acceptance_"):
            del sys.modules[name]


def run(tool: ModuleType, output: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    arguments = ["--device", "cpu", "--tiny", "--output", str(output), *options]
    code = tool.main(arguments)
    return code, json.loads(output.read_text())["sections"]


def test_everything_right(tool: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "results" / "a.json"
    code, sections = run(tool, output, "--kernels", "cpu", "te", "naive")
    assert code == 0
    by_kernel = {
        kernel: {s["status"] for name, s in sections.items() if f"{kernel}-" in f"{name}-"}
        for kernel in ("cpu", "naive", "te")
    }
    assert by_kernel == {"cpu": {"ok"}, "naive": {"ok"}, "te": {"skipped"}}
    assert {name.split("/")[0] for name in sections} == {"self-test", "equality", "dense", "shapes"}
    timed = sections["shapes/gqa-cpu"]["values"]
    assert timed["forward ms"] > 0
    assert timed["executed/needed"] >= 1
    assert {"out", "lse", "dq", "dk", "dv"} <= timed.keys()
    assert sections["equality/cpu-mqa-large-logits"]["values"]["allowed dq"] > 0
    said = output.with_suffix(".md").read_text()
    assert "| te-gqa | skipped |" in said
    assert f"{len(sections)} sections, 0 failed." in said
    assert {p.name for p in output.parent.iterdir()} == {"a.json", "a.md"}


def test_a_wrong_kernel_is_found_and_the_others_go_on(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cpu.backward

    def wrong_dk(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = right(*args)
        return dq, 1.1 * dk, dv

    output = tmp_path / "a.json"
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "backward", wrong_dk)
        code, sections = run(tool, output, "--kernels", "cpu", "naive")
    assert code == 1
    failed = {name for name, s in sections.items() if s["status"] == "failed"}
    assert failed == {n for n in sections if "cpu" in n}
    assert sections["equality/cpu-gqa"]["reason"] == "dk above the allowed error"
    assert sections["shapes/mha-cpu"]["reason"] == "dk above the allowed error"
    assert "its dk is off" in sections["self-test/cpu-gqa"]["values"]["NaN in gaps"]
    # Mended: only what failed runs again.
    kept = {name: s for name, s in sections.items() if name not in failed}
    code, sections = run(tool, output, "--kernels", "cpu", "naive")
    assert code == 0
    assert {name: s for name, s in sections.items() if name not in failed} == kept


def test_an_error_is_recorded_with_its_place(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no such | engine")

    monkeypatch.setattr(cpu, "forward", broken)
    code, sections = run(tool, tmp_path / "a.json")
    assert code == 1
    section = sections["equality/cpu-gqa"]
    assert section["reason"] == "RuntimeError: no such | engine"
    assert "in broken" in section["traceback"]
    assert sections["dense/gqa"]["status"] == "ok"
    assert "no such \\| engine" in (tmp_path / "a.md").read_text()


def test_other_environment_starts_anew(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "a.json"
    run(tool, output)
    monkeypatch.setattr(tool, "environment", lambda device: {"device": "another"})
    monkeypatch.setattr(tool, "TINY", [])
    assert run(tool, output) == (0, {})


def test_out_of_time(tool: ModuleType, tmp_path: Path) -> None:
    code, sections = run(tool, tmp_path / "a.json", "--minutes", "1e-9")
    assert code == 1
    assert {s["status"] for s in sections.values()} == {"not begun"}
    code, sections = run(tool, tmp_path / "a.json")
    assert {s["status"] for s in sections.values()} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "-1"], "--minutes -1 must be positive"),
        (["--kernels", "bogus"], "invalid choice: 'bogus'"),
        (["--device", "foo"], "--device 'foo' is no device"),
    ],
)
def test_bad_arguments_are_one_line(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_shapes_of_the_paper(tool: ModuleType) -> None:
    """Four documents of 256k with 512 anchors: 32k queries; 128k and 16k keys a rank."""
    found = {s.name: (s.heads, s.kv_heads, s.plan()) for s in tool.PAPER}
    assert found.keys() == {"35b-a3b-p8", "35b-a3b-p64", "27b-p8", "27b-p64"}
    for name, (heads, kv_heads, plan) in found.items():
        assert (heads, kv_heads) == ((32, 4) if "35b" in name else (32, 8))
        assert plan.num_blocks * plan.block_size == 32768
        assert plan.num_rows(0) == (131072 if name.endswith("p8") else 16384)


def test_needs_only_torch(tmp_path: Path) -> None:
    """Nothing installed, from any folder, without Megatron and what comes with it."""
    hidden = "megatron transformer_engine psutil rich scipy matplotlib safetensors tensorboard"
    script = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({hidden.split()}))\n"
        f"sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]\n"
        f"sys.argv = ['x', '--device', 'cpu', '--tiny', '--output', {str(tmp_path / 'a.json')!r}]\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert "0 failed" in process.stdout
