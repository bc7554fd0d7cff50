"""The exported folder is whole or absent."""

import json
from pathlib import Path

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export import folder as folder_module
from megatron_splitkv.export import read_drafter, write_drafter
from tests.evaluate.models import DRAFTER, random_zlab_tensors


def test_what_was_written_is_read(tmp_path: Path) -> None:
    tensors = random_zlab_tensors()
    write_drafter(tmp_path / "drafter", tensors, DRAFTER)
    config, found = read_drafter(tmp_path / "drafter")
    assert config == DRAFTER
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert {p.name for p in (tmp_path / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_a_crash_leaves_the_old_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "drafter"
    write_drafter(target, random_zlab_tensors(seed=1), DRAFTER)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "to_config_json", fail)
        with pytest.raises(OSError, match="disk full"):
            write_drafter(target, random_zlab_tensors(seed=2), DRAFTER)
    assert torch.equal(
        read_drafter(target)[1]["fc.weight"], random_zlab_tensors(seed=1)["fc.weight"]
    )
    write_drafter(target, random_zlab_tensors(seed=3), DRAFTER)
    assert torch.equal(
        read_drafter(target)[1]["fc.weight"], random_zlab_tensors(seed=3)["fc.weight"]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is no exported drafter"):
        write_drafter(tmp_path, random_zlab_tensors(), DRAFTER)


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = random_zlab_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16()
    with pytest.raises(ConfigError, match=r"several dtypes \(bfloat16, float32\)"):
        write_drafter(tmp_path / "drafter", tensors, DRAFTER)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_drafter(tmp_path / "nowhere")
    write_drafter(tmp_path / "drafter", random_zlab_tensors(), DRAFTER)
    weights = tmp_path / "drafter/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_drafter(tmp_path / "drafter")
    weights.write_bytes(content)
    config_file = tmp_path / "drafter/config.json"
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(values | {"num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"holds layers\.1\."):
        read_drafter(tmp_path / "drafter")
