"""Reading SpecForge's feature files: layouts, order, rows on demand, and what is refused."""

import errno
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.partial import DiskFullError
from megatron_splitkv.data.specforge import SpecForgeData
from tests.data.offline_files import save_specforge


def sample(length: int = 6, width: int = 8, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 50, (length,), generator=generator),
        "loss_mask": (torch.arange(length) >= 2).long(),
        "hidden_states": torch.randn(1, length, width, generator=generator).bfloat16(),
    }


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_is_read_bit_by_bit(tmp_path: Path, packed: bool) -> None:
    content = sample()
    path = save_specforge(tmp_path, 3, content, packed)
    (opened,) = (SpecForgeData(tmp_path).open(0),)
    assert opened.path == path
    assert opened.token_ids.dtype == torch.int64
    assert torch.equal(opened.token_ids, content["input_ids"])
    assert opened.loss_mask.tolist() == [False, False, True, True, True, True]
    assert (opened.feature_width, opened.final_width, opened.dtype) == (8, 0, torch.bfloat16)
    features, final = opened.read(2, 5)
    assert torch.equal(features, content["hidden_states"][0, 2:5])
    assert final is None


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (2001, 10, 9, 2):
        save_specforge(tmp_path, number, sample(length=number % 7 + 1), packed=number == 9)
    data = SpecForgeData(tmp_path)
    names = [data.open(i).path.name for i in range(len(data))]
    assert names == ["data_2.ckpt", "data_9.ckpt.gz", "data_10.ckpt", "data_2001.ckpt"]


def test_a_plain_file_is_mapped_and_its_rows_are_views(tmp_path: Path) -> None:
    path = save_specforge(tmp_path, 0, sample(length=50, width=1000))
    opened = SpecForgeData(tmp_path).open(0)
    first, second = opened.read(0, 10)[0], opened.read(10, 20)[0]
    assert second.data_ptr() - first.data_ptr() == 10 * 1000 * 2
    assert str(path) in Path("/proc/self/maps").read_text()


def test_an_unpacked_copy_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    content = sample()
    save_specforge(tmp_path, 0, content, packed=True)
    opened = SpecForgeData(tmp_path).open(0)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert torch.equal(opened.read(0, 6)[0], content["hidden_states"][0])


def test_dspark_and_eagle3_carry_what_the_head_reads(tmp_path: Path) -> None:
    content = sample()
    final = torch.randn(1, 6, 4).bfloat16()
    save_specforge(tmp_path, 0, {**content, "target_last_hidden_states": final})
    states = content.pop("hidden_states")
    save_specforge(tmp_path, 1, {**content, "aux_hidden_state": states, "hidden_state": final})
    data = SpecForgeData(tmp_path)
    for number in (0, 1):
        opened = data.open(number)
        assert (opened.feature_width, opened.final_width) == (8, 4)
        features, last = opened.read(1, 6)
        assert torch.equal(features, states[0, 1:])
        assert last is not None
        assert torch.equal(last, final[0, 1:])


def test_tokens_may_have_a_batch_axis_and_states_none(tmp_path: Path) -> None:
    content = sample()
    bare = {
        "input_ids": content["input_ids"][None],
        "loss_mask": content["loss_mask"][None].bool(),
        "hidden_states": content["hidden_states"][0],
    }
    save_specforge(tmp_path, 0, bare)
    opened = SpecForgeData(tmp_path).open(0)
    assert torch.equal(opened.token_ids, content["input_ids"])
    assert torch.equal(opened.read(0, 6)[0], content["hidden_states"][0])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"input_ids": None}, "input_ids is no tensor"),
        ({"hidden_states": "x"}, "hidden_states is no tensor"),
        ({"loss_mask": torch.ones(5)}, "differ in length: input_ids 6, loss_mask 5"),
        ({"hidden_states": torch.ones(1, 5, 8)}, "input_ids 6, loss_mask 6, hidden_states 5"),
        ({"target_last_hidden_states": torch.ones(1, 7, 8)}, "target_last_hidden_states 7"),
        ({"hidden_states": torch.ones(2, 6, 8)}, r"hidden_states has shape \[2, 6, 8\]"),
        ({"input_ids": torch.ones(2, 6).long()}, r"input_ids has shape \[2, 6\]"),
        ({"input_ids": torch.ones(6).half()}, "input_ids are torch.float16, expected int64 or"),
        ({"hidden_states": torch.ones(6, 8).to_sparse()}, "hidden_states is no tensor"),
        (
            {"target_last_hidden_states": torch.ones(1, 6, 8)},
            "hidden_states are torch.bfloat16 and target_last_hidden_states torch.float32",
        ),
        ({"hidden_states": torch.ones(1, 6, 8).int()}, "dtype torch.int32; float32, bfloat16"),
    ],
)
def test_a_broken_sample_is_named(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    path = save_specforge(tmp_path, 0, {**sample(), **change})
    with pytest.raises(ConfigError, match=line) as caught:
        SpecForgeData(tmp_path).open(0)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    save_specforge(tmp_path, 0, {"input_ids": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"data_0.ckpt holds input_ids, expected input_ids, loss"):
        SpecForgeData(tmp_path).open(0)


def test_an_empty_sample_is_named(tmp_path: Path) -> None:
    save_specforge(tmp_path, 0, sample(length=0))
    with pytest.raises(ConfigError, match=r"data_0.ckpt holds no token"):
        SpecForgeData(tmp_path).open(0)


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_file_is_one_line(tmp_path: Path, packed: bool) -> None:
    path = save_specforge(tmp_path, 0, sample(length=200), packed)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ConfigError, match=r"data_0.ckpt\S* cannot be read") as caught:
        SpecForgeData(tmp_path).open(0)
    assert "\n" not in str(caught.value)


def test_no_room_to_unpack_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_specforge(tmp_path, 0, sample(), packed=True)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DiskFullError, match=f"no space left in {tempfile.gettempdir()} "):
        SpecForgeData(tmp_path).open(0)


def test_a_damaged_pickle_is_one_line(tmp_path: Path) -> None:
    """Whatever the unpickler raises: a memo that is not there is a KeyError."""
    with zipfile.ZipFile(tmp_path / "data_0.ckpt", "w") as file:
        file.writestr("data/data.pkl", b"\x80\x02]h\x07.")
        file.writestr("data/version", b"3\n")
    with pytest.raises(ConfigError, match=r"data_0.ckpt cannot be read \(KeyError\)"):
        SpecForgeData(tmp_path).open(0)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({**sample(), "x": Bomb(tmp_path / "ran")}, tmp_path / "data_0.ckpt")
    with pytest.raises(ConfigError, match=r"data_0.ckpt cannot be read"):
        SpecForgeData(tmp_path).open(0)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "data_0.ckpt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ConfigError, match=r"data_0.ckpt cannot be read"):
        SpecForgeData(tmp_path).open(0)
    assert not (tmp_path / "ran").exists()


def test_a_file_beside_its_packed_twin_is_refused(tmp_path: Path) -> None:
    save_specforge(tmp_path, 0, sample())
    save_specforge(tmp_path, 0, sample(), packed=True)
    with pytest.raises(ConfigError, match=r"data_0.ckpt lies beside data_0.ckpt.gz; remove one"):
        SpecForgeData(tmp_path)


def test_a_folder_without_feature_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*.ckpt or \*.ckpt.gz"):
        SpecForgeData(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        SpecForgeData(tmp_path / "absent")
