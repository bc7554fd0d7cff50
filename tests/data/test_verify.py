"""Every damaged file of a store is named, not only the first."""

import json
import os
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_index import StoreFile
from megatron_splitkv.data.verify import recorded_files, verify_run_files, verify_store
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What lies in a finished run beside its stores, and something that is not its own."""
    (tmp_path / "target" / "deep").mkdir(parents=True)
    for name in ("prompts.jsonl", "target/weights", "target/deep/words", "notes.txt"):
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "train").mkdir()
    files = recorded_files(tmp_path, ("prompts.jsonl", "lengths.png", "target"))
    summary = {"files": files, "target_folder": "target"}
    (tmp_path / "prepare.json").write_text(json.dumps(summary))
    return tmp_path


def test_every_flipped_bit_beside_the_stores_is_named(run: Path) -> None:
    check = verify_run_files(run, ("train", "valid"))
    assert (check.num_files, check.num_bytes, check.problems) == (3, 24 + 25 + 28, ())
    assert check.not_checked == ("notes.txt", "prepare.json")
    for name in ("prompts.jsonl", "target/weights", "target/deep/words"):
        for place in (0, 12, -1):
            _flip(run / name, place)
            (problem,) = verify_run_files(run, ("train",)).problems
            assert problem.startswith(f"{run / name} is corrupted: checksum sha256 ")
            _flip(run / name, place)
    (run / "target" / "weights").unlink()
    os.truncate(run / "prompts.jsonl", 5)
    cut, gone = verify_run_files(run, ("train",)).problems
    assert cut.startswith(f"{run / 'prompts.jsonl'} has 5 bytes, expected 24")
    assert gone == f"{run / 'target/weights'} is missing; prepare it again with --overwrite"


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"files": [1]}', b'{"files": {"a": {}}}'])
def test_a_damaged_summary_is_the_problem(run: Path, content: bytes) -> None:
    (run / "prepare.json").write_bytes(content)
    (problem,) = verify_run_files(run, ("train",)).problems
    assert problem.startswith(f"{run / 'prepare.json'} is ")


def test_what_is_not_recorded_is_not_checked(run: Path) -> None:
    (run / "prepare.json").write_text('{"target_folder": "../model"}')
    check = verify_run_files(run, ("train",))
    assert (check.num_files, check.problems) == (0, ())
    assert check.not_checked == ("../model", "notes.txt", "prepare.json", "prompts.jsonl", "target")
