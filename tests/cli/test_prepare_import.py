"""`splitkv prepare --from-specforge` and `--from-speculators`, as a user types them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.cli import main
from megatron_splitkv.data import speculators_data
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.tiny_target import (
    TinyTargetConfig,
    build_tiny_target,
    save_tiny_target,
)
from tests.data.offline_files import dspark_sample, save_specforge, save_speculators
from tests.data.test_speculators_data import SAVED_BY_DATASETS, SAVED_IDS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny_target(build_tiny_target(TinyTargetConfig(hidden_size=32)), folder)
    return folder


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The three rows that `datasets` saved for the tests."""
    return [(torch.tensor(ids), torch.arange(len(ids)) >= 3) for ids in SAVED_IDS]


def speculators_folder(folder: Path, target: Path) -> Path:
    shutil.copytree(SAVED_BY_DATASETS, folder)
    model = load_target(target)
    for row, (ids, _) in enumerate(documents()):
        save_speculators(folder, row, model, ids, (1, 4))
    return folder


def check(run: Path, summary: dict[str, object], trainer: str) -> None:
    assert summary["imported_from"] == trainer
    assert summary["target_layer_ids"] == [0, 3]
    for name, numbers in (("train", (0, 1)), ("valid", (2,))):
        store = FeatureStore(run / name, verify="full")
        assert store.meta.final_hidden
        assert [store.token_ids(i).tolist() for i in range(len(store))] == [
            SAVED_IDS[number] for number in numbers
        ]


def test_specforge_s_files_become_a_run(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_target(target)
    for number, (ids, mask) in enumerate(documents()):
        sample = dspark_sample(model, ids, mask, (0, 3))
        for name in ("hidden_states", "target_last_hidden_states"):
            sample[name] = sample[name].bfloat16()
        save_specforge(tmp_path / "data", number, sample, packed=number == 1)
    command = ["prepare", "--from-specforge", str(tmp_path / "data"), "--target", str(target)]
    command += ["--output", str(tmp_path / "run"), "--final-hidden", "--json"]
    assert main(command) == 0
    summary = json.loads(capsys.readouterr().out)
    check(tmp_path / "run", summary, "SpecForge")
    assert summary["dtype"] == "bfloat16"
    assert main([*command, "--target-layer-ids", "0,3"]) == 2
    assert "of another command" in capsys.readouterr().err


def test_speculators_files_become_a_run(
    tmp_path: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(ids.numpy().astype(np.int64), mask.numpy()) for ids, mask in documents()]
    monkeypatch.setattr(speculators_data, "ArrowRows", lambda folder: rows)
    folder = speculators_folder(tmp_path / "data", target)
    command = ["prepare", "--from-speculators", str(folder), "--target", str(target), "--json"]
    command += ["--output", str(tmp_path / "run"), "--final-hidden", "--target-layer-ids"]
    assert main([*command, "1,4"]) == 2
    assert "speculators names them 1,4), not of 1,4; give --target-layer-ids 0,3" in (
        capsys.readouterr().err
    )
    assert main([*command, "0,3", "--overwrite"]) == 0
    check(tmp_path / "run", json.loads(capsys.readouterr().out), "speculators")


def test_a_dataset_that_datasets_saved_becomes_a_run(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    folder = speculators_folder(tmp_path / "data", target)
    command = ["prepare", "--from-speculators", str(folder), "--target", str(target), "--json"]
    command += ["--output", str(tmp_path / "run"), "--final-hidden"]
    assert main(command) == 0
    check(tmp_path / "run", json.loads(capsys.readouterr().out), "speculators")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--target", "tiny"], "--from-specforge needs --target FOLDER"),
        (["--text", "x.txt"], "--text does not go with --from-specforge"),
        (["--regenerate"], "--regenerate does not go with --from-specforge"),
        (["--target-layer-ids", "0,9"], "target layer 9 does not exist"),
        ([], "holds no *.ckpt or *.ckpt.gz"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_exit_code_2(
    tmp_path: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    line: str,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if options:
        ids, mask = documents()[0]
        save_specforge(data, 0, dspark_sample(load_target(target), ids, mask, (0, 3)))
    command = ["prepare", "--from-specforge", str(data), "--output", str(tmp_path / "run")]
    capsys.readouterr()  # Transformers' bars.
    assert main([*command, "--target", str(target), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert line in error
    assert "\n" not in error
    assert not (tmp_path / "run").exists()
