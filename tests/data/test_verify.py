"""Every damaged file of a store is named, not only the first."""

import json
import os
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import StoreFile
from megatron_splitkv.data.verify import verify_store
from megatron_splitkv.testing.synthetic import make_synthetic_store

LENGTHS = [600, 600, 600, 600]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_synthetic_store(tmp_path / "s", LENGTHS, final_hidden=True)
    return tmp_path / "s"


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_whole_store_is_well_and_progress_counts_its_bytes(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    check = verify_store(folder, lambda done, total: calls.append((done, total)))
    data = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert (check.num_files, check.num_bytes, check.problems) == (len(data), sum(data), ())
    assert calls[0] == (0, sum(data))
    assert calls[-1] == (sum(data), sum(data))
    assert len(calls) == len(data) + 1


def test_one_flipped_bit_anywhere_is_found_in_every_file(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        whole = file.read_bytes()
        for place in (0, 9, len(whole) // 2, len(whole) - 1):
            _flip(file, place)
            (problem,) = verify_store(folder).problems
            assert problem.startswith(f"{file} is corrupted: checksum sha256 ")
            assert "\n" not in problem
            with pytest.raises(ConfigError, match=file.name):
                FeatureStore(folder, verify="full")
            file.write_bytes(whole)
    assert verify_store(folder).problems == ()


def test_all_damaged_files_are_named_in_order(folder: Path) -> None:
    files = sorted(folder.glob("shard-*"))
    assert len(files) == 4
    _flip(files[3], 100)
    os.truncate(files[0], 1000)
    files[1].unlink()
    _flip(folder / "target_frozen.safetensors", -1)
    problems = verify_store(folder).problems
    assert [line.split(" ", 1)[0] for line in problems] == [
        str(files[0]),
        str(files[1]),
        str(files[3]),
        str(folder / "target_frozen.safetensors"),
    ]
    for line, word in zip(
        problems, ("has 1000 bytes", "missing", "corrupted", "corrupted"), strict=True
    ):
        assert word in line


def test_a_damaged_index_is_the_only_problem_that_can_be_told(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["lengths"][0] += 1
    (folder / "index.json").write_text(json.dumps(index))
    (problem,) = verify_store(folder).problems
    assert "index.json is corrupted" in problem
    (problem,) = verify_store(folder / "nowhere").problems
    assert "there is no such folder" in problem


def test_a_file_that_the_disk_no_longer_gives_is_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StoreFile(folder / "index.json", (folder / "index.json").stat().st_size, "")

    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megatron_splitkv.data.store_index.file_sha256", broken)
    assert "index.json cannot be read: Input/output error" in str(file.problem(full=True))
    assert len(verify_store(folder).problems) == 5
