"""Feature stores and checkpoints: sound ones, and each way in which one is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_splitkv.doctor import Finding, Status
from megatron_splitkv.doctor.storage import checkpoint_findings, store_finding
from megatron_splitkv.export import checkpoint
from megatron_splitkv.testing import gloo_pool
from megatron_splitkv.testing.synthetic import make_synthetic_store
from tests.drafter.harness import TINY
from tests.export.megatron_checkpoint import save_checkpoints, write_tracker


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_synthetic_store(tmp_path / "train", [40, 31, 50])
    return tmp_path / "train"


def test_a_sound_store(store: Path) -> None:
    finding, facts = store_finding(store)
    assert finding.status is Status.OK, finding
    assert (facts["documents"], facts["tokens"], facts["longest"]) == (3, 121, 50)
    assert "3 documents, 121 tokens" in finding.detail


def test_one_changed_byte_in_a_store(store: Path) -> None:
    shard = next(path for path in store.iterdir() if path.name.startswith("shard"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    finding, facts = store_finding(store)
    assert finding.status is Status.PROBLEM
    assert "is corrupted: checksum" in finding.detail
    assert facts == {}


def test_the_folder_above_a_store_says_which_one_was_meant(store: Path) -> None:
    finding, _ = store_finding(store.parent)
    assert finding.status is Status.PROBLEM
    assert finding.fix == f"name the store itself: {store}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("save")
    folders = [root / "iter_0000003", root / "iter_0000010"]
    for folder in folders:
        folder.mkdir()
    gloo_pool(2).run(save_checkpoints, *map(str, folders), 2)
    shutil.rmtree(folders[0])
    (root / "drafter_config.json").write_text(TINY.to_json())
    write_tracker(root, "10")
    return root


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "save"))


def checked(folder: Path) -> Finding:
    (finding,), _ = checkpoint_findings(folder)
    return finding


def test_a_sound_checkpoint(saved: Path) -> None:
    (finding,), facts = checkpoint_findings(saved)
    assert finding.status is Status.OK, finding
    assert facts["iteration"] == 10
    assert facts["parameters"] == TINY.num_parameters()
    assert facts["writers"] == 2
    assert facts["has_optimizer"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    finding = checked(tmp_path)
    assert finding.status is Status.PROBLEM
    assert "is no Megatron checkpoint folder" in finding.detail


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("drafter_config.json", "it is of no drafter"),
        ("iter_0000010/metadata.json", "has no metadata.json, which Megatron needs to resume"),
        ("iter_0000010/__1_0.distcp", "is missing although the checkpoint's table lists it"),
        ("iter_0000010/.metadata", "is no torch_dist checkpoint"),
    ],
)
def test_a_missing_file(folder: Path, name: str, said: str) -> None:
    (folder / name).unlink()
    finding = checked(folder)
    assert finding.status is Status.PROBLEM
    assert said in finding.detail


def test_a_truncated_file(folder: Path) -> None:
    """Also one that holds optimizer states only where it is cut."""
    file = folder / "iter_0000010/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    finding = checked(folder)
    assert finding.status is Status.PROBLEM
    assert "it is truncated" in finding.detail


def test_another_drafters_configuration(folder: Path) -> None:
    config = json.loads(TINY.to_json()) | {"ffn_hidden_size": TINY.ffn_hidden_size + 8}
    (folder / "drafter_config.json").write_text(json.dumps(config))
    finding = checked(folder)
    assert finding.status is Status.PROBLEM
    assert "the configuration asks for" in finding.detail


def test_weights_that_are_not_finite(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.read_model_tensors

    def spoilt(path: Path) -> dict[str, torch.Tensor]:
        tensors = read(path)
        tensors["fc.weight"][0, 0] = torch.nan
        return tensors

    monkeypatch.setattr(checkpoint, "read_model_tensors", spoilt)
    finding = checked(saved)
    assert finding.status is Status.PROBLEM
    assert "fc.weight holds NaN" in finding.detail
