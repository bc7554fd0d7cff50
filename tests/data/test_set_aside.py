"""What a command replaces is there again after it was refused, wherever it was killed before."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.partial import DiskFullError
from megatron_splitkv.data.prepare_job import PrepareJob
from megatron_splitkv.data.work import Worker

INPUTS = {"text 1 a.txt": "abc"}


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is no part of it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def job(output: Path, command: str) -> PrepareJob:
    return PrepareJob(output, {"command": command}, Worker(), makes_target=True)


def inputs() -> dict[str, str]:
    return INPUTS


def work(one: PrepareJob, shards: int) -> None:
    """All steps of a job up to some shards."""
    one.once("target", lambda: {"of": str(one.output)})
    (one.folder / "target").mkdir(exist_ok=True)
    (one.folder / "target" / "weights").write_text("w" * shards)
    (one.folder / "prompts.jsonl").write_text("p" * shards)
    one.once("samples", lambda: {"shards": shards})
    (one.folder / "train").mkdir(exist_ok=True)
    for shard in range(shards):
        (one.folder / "train" / f"shard-{shard}").write_text(str(shard))


def finished(output: Path, command: str = "old") -> None:
    one = job(output, command)
    with one.opened(inputs):
        work(one, 2)
        one.publish(lambda: {"shards": 2})


def unfinished(output: Path, command: str = "old", overwrite: bool = False) -> None:
    one = job(output, command)
    with one.opened(inputs, overwrite):
        work(one, 3)


def unfinished_over_finished(output: Path) -> None:
    finished(output, "older")
    unfinished(output, overwrite=True)


def of_unknown_origin(output: Path) -> None:
    finished(output)
    (output / "prepare_job.json").unlink()


def tree(output: Path) -> dict[str, bytes]:
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != "leader.lock"
    }


def refuse(output: Path, steps: int, error: Exception, *, overwrite: bool = True) -> None:
    new = job(output, "new")
    with new.opened(inputs, overwrite):
        if steps:
            work(new, steps - 1)
        raise error


BEFORE = [finished, unfinished, unfinished_over_finished]


@pytest.mark.parametrize("before", [*BEFORE, of_unknown_origin])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_refused_command_leaves_what_was_there(
    tmp_path: Path, before: Callable[[Path], None], steps: int
) -> None:
    before(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    expected = tree(tmp_path)
    with pytest.raises(ConfigError, match="line 2 is broken"):
        refuse(tmp_path, steps, ConfigError("line 2 is broken"))
    assert tree(tmp_path) == expected
    assert (tmp_path / "prepare_job").exists() == (before in BEFORE[1:])


def test_the_command_of_before_goes_on(tmp_path: Path) -> None:
    unfinished_over_finished(tmp_path)
    with pytest.raises(ConfigError, match="line 2 is broken"):
        refuse(tmp_path, 4, ConfigError("line 2 is broken"))
    one = job(tmp_path, "old")
    with one.opened(inputs):
        assert one.once("samples", lambda: pytest.fail("made again")) == {"shards": 3}
        one.publish(lambda: {"shards": 3})
    names = ["prepare.json", "prepare_job.json", "prompts.jsonl", "target/weights"]
    assert list(tree(tmp_path)) == [*names, *(f"train/shard-{i}" for i in range(3))]


@pytest.mark.parametrize(
    "error", [DiskFullError("no space", "go on"), OSError(errno.EIO, "broken")]
)
def test_a_disk_that_fails_keeps_what_is_worth_it(tmp_path: Path, error: Exception) -> None:
    unfinished(tmp_path)
    expected = tree(tmp_path)
    with pytest.raises(type(error)):
        refuse(tmp_path, 0, error)
    assert tree(tmp_path) == expected
    with pytest.raises(type(error)):
        refuse(tmp_path, 4, error)
    new = job(tmp_path, "new")
    with new.opened(inputs):
        assert new.once("samples", lambda: pytest.fail("made again")) == {"shards": 3}
    # The same command finds at last that it is refused.
    with pytest.raises(ConfigError, match="unreadable"):
        refuse(tmp_path, 0, ConfigError("document 7 is unreadable"), overwrite=False)
    assert tree(tmp_path) == expected


def test_units_outlive_a_full_disk_but_not_a_refusal(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        one = job(tmp_path / "run", "new")
        with one.opened(inputs):
            (one.folder / "tokenise").mkdir(exist_ok=True)
            (one.folder / "tokenise" / "unit-0").write_text("u")
            raise error

    with pytest.raises(DiskFullError):
        fail(DiskFullError("no space", "go on"))
    assert list(tree(tmp_path / "run")) == ["prepare_job/tokenise/unit-0", "prepare_job.json"]
    with pytest.raises(ConfigError, match="broken"):
        fail(ConfigError("line 2 is broken"))
    assert tree(tmp_path / "run") == {}


class Killed:
    """Stops the process before the n-th change of a name, and before all behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        for module, name in ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir")):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))
        monkeypatch.setattr(shutil, "rmtree", self._counting(shutil.rmtree))

    def _counting(self, call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return call(*args, **options)

        return counting


@pytest.mark.parametrize("before", BEFORE)
def test_a_kill_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]
) -> None:
    """Of setting aside, of the new job and of bringing back."""
    goes_on = brought_back = 0
    for at in range(1000):
        output = tmp_path / str(at)
        before(output)
        expected = tree(output)
        with monkeypatch.context() as patch:
            Killed(patch, at)
            with pytest.raises((KeyboardInterrupt, ConfigError)) as end:
                refuse(output, 4, ConfigError("line 2 is broken"))
        record = output / "prepare_job.json"
        if record.exists() and b'"new"' in record.read_bytes():
            goes_on += 1
            with pytest.raises(ConfigError, match="broken"):
                refuse(output, 4, ConfigError("line 2 is broken"), overwrite=False)
        else:
            brought_back += 1
            with job(output, "old").opened(inputs):
                pass
        assert tree(output) == expected
        if end.type is ConfigError:
            break
    assert goes_on > 3
    assert brought_back > 10
