"""Partial files of the dead are told from those of the living; a full disk is explained."""

import errno
import fcntl
import os
import pickle
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import partial
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.partial import (
    DiskFullError,
    folder_written_aside,
    full_disk_explained,
    open_partial,
    remove_dead_partials,
    write_aside,
)
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter, StoreBuilder

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=6, hidden_size=4, vocab_size=32, mask_token_id=31
)
META = StoreMeta(TARGET, (1, 3))
Usage = namedtuple("Usage", "total used free")


def test_only_the_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.0.partial").write_bytes(b"left by a kill")
    (tmp_path / "finished").write_bytes(b"x")
    with open_partial(tmp_path / "b") as living:
        remove_dead_partials(tmp_path)
        remove_dead_partials(tmp_path, finished=True)
        assert sorted(os.listdir(tmp_path)) == [Path(living.name).name, "finished"]
    remove_dead_partials(tmp_path)
    assert os.listdir(tmp_path) == ["finished"]


def test_without_locks_nothing_is_removed_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    open_partial(tmp_path / "a").close()
    remove_dead_partials(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    remove_dead_partials(tmp_path, finished=True)
    assert os.listdir(tmp_path) == []


def test_a_name_that_was_cleared_under_the_writer_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, cleared = fcntl.flock, []

    def clear_first(file: object, how: int) -> None:
        if not cleared:
            cleared.extend(tmp_path.iterdir())
            cleared[0].unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    with open_partial(tmp_path / "a") as file:
        assert Path(file.name).exists()
        assert Path(file.name) != cleared[0]


def test_a_file_written_aside_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_aside(tmp_path / "a", b"one")
    monkeypatch.setattr(os, "fsync", _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_aside(tmp_path / "a", b"two")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"one"


def _raise(error: BaseException) -> Callable[..., None]:
    def raising(*_: object) -> None:
        raise error

    return raising


class FullDisk:
    """A disk that takes no more than some bytes from now on, however often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, free: int) -> None:
        self.room, self.write = room, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)
        monkeypatch.setattr(partial, "disk_usage", lambda path: Usage(0, 0, free))

    def __call__(self, handle: int, content: memoryview, offset: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.write(handle, content[: self.room], offset)  # short before it is refused
        self.room -= taken
        return taken


def _build(path: Path) -> None:
    """Four shards of one document each, those that are missing."""
    builder = StoreBuilder(path, META, [10, 20, 30, 40], max_shard_bytes=1)
    builder.write_frozen(torch.zeros(32, 4), torch.ones(32, 4))
    for k in builder.missing():
        n = 10 * (k + 1)
        with builder.open_shard(k, [torch.arange(n) % 30], [torch.ones(n).bool()]) as shard:
            shard.write_rows(0, 0, torch.full((n, 8), float(k)))
    builder.close()


def test_a_full_disk_loses_nothing_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build(tmp_path / "whole")
    sizes = [f.stat().st_size for f in sorted((tmp_path / "whole").glob("shard-*"))]
    path, stops = tmp_path / "s", 0
    # Each run finds a little more room than the one before, and the disk full at another place.
    for room in range(100, 10_000, 217):
        with monkeypatch.context() as patch:
            FullDisk(patch, room, free=100)
            try:
                _build(path)
            except ConfigError as error:
                stops += 1
                finished = sorted(f.name for f in path.glob("shard-*.safetensors"))
                missing = sum(sizes[len(finished) :])
                message = str(error)
                assert message.startswith(f"no space left in {path}")
                assert "(No space left on device): 100 bytes are free" in message
                if missing:
                    assert f"{missing:,} are still to be written; free at least" in message
                    assert f"{missing - 100:,} bytes, then give the same command" in message
                assert "\n" not in message
                assert not list(path.glob("*.partial"))
                with pytest.raises(ConfigError, match="is not a feature store"):
                    FeatureStore(path)
            else:
                break
    assert stops >= 10
    FeatureStore(path, verify="full")
    for file in (tmp_path / "whole").iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


def test_a_quota_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch, 0, free=1 << 40)
    with pytest.raises(ConfigError, match=r"1,099,511,627,776 bytes are free, .*; free room, then"):
        _build(tmp_path / "s")


def test_the_streaming_writer_explains_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, 1000, free=7)
    writer = FeatureStoreWriter(tmp_path / "s", META)
    writer.add_document(torch.arange(29), torch.ones(29).bool(), torch.ones(29, 8))
    message = r"no space left in .*/s .*: 7 bytes are free, 1,\d\d\d are .* write the store anew"
    with pytest.raises(ConfigError, match=message):
        writer.close()
    assert list((tmp_path / "s").iterdir()) == []


def test_other_errors_of_the_disk_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", _raise(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        _build(tmp_path / "s")


def test_a_folder_written_aside_is_whole_or_absent(tmp_path: Path) -> None:
    (tmp_path / "deep" / "target.partial").mkdir(parents=True)
    (tmp_path / "deep" / "target.partial" / "old").write_text("left by a kill")

    def fill(error: BaseException | None) -> None:
        with folder_written_aside(tmp_path / "deep" / "target") as aside:
            (aside / "config").mkdir()
            (aside / "config" / "new").write_text("new")
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        fill(KeyboardInterrupt())
    assert os.listdir(tmp_path / "deep") == []
    fill(None)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == [
        "deep",
        "target",
        "config",
        "new",
    ]


def test_the_outermost_says_what_to_do_then_and_the_error_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "lengths.png"
    error = OSError(errno.EDQUOT, "Disk quota exceeded", str(file))
    with (
        pytest.raises(DiskFullError) as found,
        full_disk_explained(tmp_path, "go on"),
        full_disk_explained(tmp_path, "begin anew"),
    ):
        raise error
    line = str(found.value)
    assert line.startswith(
        f"no space left in {file.parent} for lengths.png (Disk quota exceeded): "
    )
    assert line.endswith(" bytes are free; free room, then go on")
    assert str(pickle.loads(pickle.dumps(found.value))) == line


def test_writers_in_rust_say_it_in_their_text(tmp_path: Path) -> None:
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    with (
        pytest.raises(DiskFullError, match=rf"no space left in {tmp_path} \(No space left on"),
        full_disk_explained(tmp_path, "go on"),
    ):
        raise SafetensorError(text)
    with pytest.raises(SafetensorError, match="13"), full_disk_explained(tmp_path, "go on"):
        raise SafetensorError("Permission denied (os error 13)")
