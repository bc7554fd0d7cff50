"""`splitkv scale`: its JSON, its files, its errors."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_splitkv.cli import main
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale import FITTED, METHODS, READINGS, Machine, study_machine
from megatron_splitkv.scale.beyond import MEMORY_LIMIT, explore, key_bytes
from megatron_splitkv.scale.draw import draw_beyond
from megatron_splitkv.scale.workload import K, Workload

DRAFTER = DFlashConfig.preset("qwen3.5-27b")


def test_json_of_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--setting", "ratio", "--drafter", "qwen3.5-27b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["constants"] == asdict(FITTED)
    assert [study["machine"] for study in result["studies"]] == list(READINGS)
    study = result["studies"][0]
    assert set(study) == {
        "machine",
        "links",
        "steps",
        "variants",
        "beyond",
        "held_out_errors",
        "order",
        "sensitivity",
    }
    assert len(study["steps"]) == 5 * 4
    step = study["steps"][0]
    assert step["modelled_seconds"] == pytest.approx(sum(step["parts"].values()))
    assert step["error"] == pytest.approx(step["modelled_seconds"] / step["measured_seconds"] - 1)
    assert all(step["held_out"] for step in study["steps"])
    assert {v["method"] for v in study["variants"]} == {m for m in METHODS if "-" in m}
    assert study["beyond"] == {}


def test_tables_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["scale", "--setting", "strong", "--output", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "measured -> modelled" in text
    assert "errors of held-out bars" in text
    assert max(map(len, text.splitlines()[:-1])) <= 80  # the last names files
    assert "…" not in text
    assert "hint: " not in text
    assert sorted(f.name for f in folder.iterdir()) == ["scale-strong.png", "scale.json"]
    assert (folder / "scale-strong.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((folder / "scale.json").read_text())["studies"]) == 2


def test_other_machines_are_not_held_to_the_paper(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    PRESETS["pcie-ethernet"].save(file)
    argv = ["scale", "--setting", "weak", "--drafter", "qwen3.5-27b", "--links", str(file)]
    assert main([*argv, "--json"]) == 0
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    assert study["links"] == asdict(PRESETS["pcie-ethernet"])
    assert "held_out_errors" not in study
    assert "measured_seconds" not in study["steps"][0]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    assert "->" not in capsys.readouterr().out


def test_links_of_a_cpu_are_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scale", "--setting", "weak", "--drafter", "qwen3.5-27b", "--links"]
    assert main([*argv, "loopback"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "hint: links 'loopback' are a CPU's: 0.015 TFLOP/s in attention" in text
    assert "bench links --save FILE" in text
    assert main([*argv, "pcie-ethernet"]) == 0
    assert "hint: " not in capsys.readouterr().out


def test_fit_prints_fresh_and_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--fit", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fitted"] == pytest.approx(result["frozen"], rel=2e-3)
    assert main(["scale", "--fit"]) == 0
    assert capsys.readouterr().out.count("frozen in the package") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--setting", "medium"], "--setting 'medium' is not known; choose one of: weak"),
        (["--drafter", "gpt"], "--drafter 'gpt' is not known; choose one of: qwen3.5-35b-a3b"),
        (["--links", "nowhere"], "'nowhere' is neither a file nor one of: nvlink-400g"),
        (["--links", "BAD"], "not JSON"),
        (["--output", "BAD"], "File exists"),
    ],
)
def test_bad_input(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("{")
    assert main(["scale", *(str(bad) if o == "BAD" else o for o in options)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_beyond_leaves_out_what_cannot_run(tmp_path: Path) -> None:
    links = FITTED.on(READINGS["400 Gb/s a node"])
    few, many = explore(DRAFTER, links, FITTED, (256 * K,), (32, 64))
    assert "a2a" in few.seconds
    assert "a2a" not in many.seconds
    assert few.fastest in few.seconds
    assert METHODS[few.best_of(own=True)].strategy == "splitkv"
    assert METHODS[many.best_of(own=False)].strategy != "splitkv"
    # Keys and values of 16M rows, 8 heads of 128, with their gradients: 2 x 2 x 2 bytes each.
    workload = Workload(8, 2 * K * K, 8 * K, 64)
    whole = (16 * K * K + 64 * K) * 8 * 128 * 8
    assert key_bytes(METHODS["all_gather"], workload, DRAFTER) == whole > MEMORY_LIMIT
    assert key_bytes(METHODS["p2p"], workload, DRAFTER) == whole / 64
    ulysses = Workload(8, 2 * K * K, 8 * K, 32)
    assert key_bytes(METHODS["a2a"], ulysses, DRAFTER) == whole / 8  # one head at least
    (long,) = explore(DRAFTER, links, FITTED, (16 * K * K,), (64,))
    assert "all_gather" not in long.seconds

    study = study_machine(Machine("toy", links, False), settings=())
    study.beyond = {"toy": [few, many]}
    draw_beyond(study, tmp_path / "beyond.png")
    assert (tmp_path / "beyond.png").read_bytes().startswith(b"\x89PNG")
