"""A job is found again by the same command, refuses another one, and leaves nothing half done."""

import json
import os
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.prepare_job import JobFinishedError, PrepareJob
from megatron_splitkv.data.work import Patience, Worker

OPTIONS = {"dtype": "float32", "taps": (1, 2)}
INPUTS = {"text 1 a.txt": "abc"}


def job(output: Path, worker: Worker | None = None, **options: object) -> PrepareJob:
    def impatient() -> Patience:
        return Patience(0.0, sleep=lambda seconds: None)

    return PrepareJob(output, OPTIONS | options, worker or Worker(), patience=impatient)


def inputs() -> dict[str, str]:
    return INPUTS


def finish(output: Path) -> None:
    one = job(output)
    with one.opened(inputs):
        (one.folder / "train").mkdir()
        (one.folder / "train" / "index.json").write_text("{}")
        (one.folder / "prompts.jsonl").write_text("prompts\n")
        assert one.publish(lambda: {"documents": 3}) == {"documents": 3}


def fail(one: PrepareJob, after: str, message: str) -> None:
    with one.opened(inputs):
        one.once(after, lambda: {"done": after})
        raise ConfigError(message)


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


FINISHED = ["prepare.json", "prepare_job.json", "prompts.jsonl", "train/index.json"]


def test_a_step_is_done_once_over_all_launches(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> dict[str, int]:
        calls.append(1)
        return {"samples": 7}

    for _ in range(2):
        one = job(tmp_path / "run")
        with one.opened(inputs):
            assert one.once("samples", make) == {"samples": 7}
    assert calls == [1]


def test_a_finished_run_holds_its_results_and_nothing_else(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    assert files(tmp_path / "run") == FINISHED
    again = job(tmp_path / "run")
    with again.opened(inputs):
        assert again.finished
        assert again.summary == {"documents": 3}


@pytest.mark.parametrize("killed_at", range(3))
def test_a_killed_move_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    moves: list[object] = []

    def replace(source: str | Path, target: Path) -> None:
        if not str(source).endswith(".partial"):
            if len(moves) == killed_at:
                raise KeyboardInterrupt
            moves.append(target)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path / "run")
    again = job(tmp_path / "run")
    with again.opened(inputs):
        assert again.ready
        assert not again.finished
        again.publish(lambda: pytest.fail("made again"))
    assert files(tmp_path / "run") == FINISHED


def test_another_command_is_refused_by_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "run"
    one = job(output)
    with one.opened(inputs):
        one.once("samples", dict)
    with (
        pytest.raises(ConfigError, match=r'unfinished prepare .*dtype: "float32", here "bfloat16"'),
        job(output, dtype="bfloat16").opened(inputs),
    ):
        pytest.fail("let in")
    with (
        pytest.raises(ConfigError, match=r'text 1 a.txt: "abc", here "xyz"'),
        job(output).opened(lambda: {"text 1 a.txt": "xyz"}),
    ):
        pytest.fail("let in")
    one = job(output)
    with one.opened(inputs):
        one.publish(dict)
    with (
        pytest.raises(ConfigError, match=r"already holds a prepared run .*taps: \[1, 2\], here \["),
        job(output, taps=(3,)).opened(inputs),
    ):
        pytest.fail("let in")


def test_a_store_of_unknown_origin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with (
        pytest.raises(ConfigError, match="does not say by which command"),
        job(tmp_path).opened(inputs),
    ):
        pytest.fail("let in")
    assert files(tmp_path) == []


def test_overwrite_deletes_the_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    new = job(tmp_path / "run", dtype="bfloat16")
    with new.opened(inputs, overwrite=True):
        assert not new.finished
        assert "train/index.json" not in files(tmp_path / "run")
        assert json.loads((tmp_path / "run" / "prepare_job.json").read_text())["options"] == {
            "dtype": "bfloat16",
            "taps": [1, 2],
        }
    assert "notes.txt" in files(tmp_path / "run")
    with (
        pytest.raises(ConfigError, match="--overwrite with 2 processes"),
        job(tmp_path / "run", Worker(0, 2)).opened(inputs, overwrite=True),
    ):
        pytest.fail("let in")


@pytest.mark.parametrize("there", [False, True])
def test_a_job_that_fails_early_leaves_nothing(tmp_path: Path, there: bool) -> None:
    output = tmp_path / "deep" / "run"
    if there:
        output.mkdir(parents=True)
    with pytest.raises(ConfigError, match="broken"):
        fail(job(output), "target", "line 2 is broken")
    assert list(tmp_path.rglob("*")) == ([tmp_path / "deep", output] if there else [])


def test_a_job_that_fails_late_keeps_what_it_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk is full"):
        fail(job(tmp_path / "run"), "samples", "the disk is full")
    again = job(tmp_path / "run")
    with again.opened(inputs):
        assert again.once("samples", lambda: pytest.fail("made again")) == {"done": "samples"}


def test_two_leaders_do_not_work_on_one_folder(tmp_path: Path) -> None:
    first, second = job(tmp_path / "run"), job(tmp_path / "run")
    with first.opened(inputs):
        with pytest.raises(ConfigError, match="another process prepares"), second.opened(inputs):
            pytest.fail("let in")
        assert first.once("samples", dict) == {}
    with second.opened(inputs):
        assert second.once("samples", lambda: pytest.fail("made again")) == {}


def test_a_follower_reads_what_the_leader_recorded(tmp_path: Path) -> None:
    follower = job(tmp_path / "run", Worker(1, 2))
    with (
        pytest.raises(ConfigError, match="process 0 began no prepare of this command"),
        follower.opened(inputs),
    ):
        pytest.fail("let in")
    leader = job(tmp_path / "run", Worker(0, 2))
    with leader.opened(inputs), follower.opened(lambda: pytest.fail("computed twice")):
        with pytest.raises(ConfigError, match="process 0 has not shown itself"):
            follower.once("samples", lambda: pytest.fail("not the leader"))
        leader.once("samples", lambda: {"samples": 5})
        assert follower.once("samples", lambda: pytest.fail("not the leader")) == {"samples": 5}
        leader.publish(dict)
        with pytest.raises(JobFinishedError):
            follower.once("samples", lambda: pytest.fail("not the leader"))
    late = job(tmp_path / "run", Worker(1, 2))
    with late.opened(inputs):
        assert late.ready
    with (
        pytest.raises(ConfigError, match="start all processes with the same command"),
        job(tmp_path / "run", Worker(1, 2), dtype="bfloat16").opened(inputs),
    ):
        pytest.fail("let in")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    (tmp_path / "run" / "prepare_job.json").write_text('{"options": ')
    with (
        pytest.raises(ConfigError, match=r"prepare_job.json is damaged .* --overwrite"),
        job(tmp_path / "run").opened(inputs),
    ):
        pytest.fail("let in")


def test_a_refused_overwrite_leaves_the_earlier_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    finish(output)
    before = {path: (output / path).read_bytes() for path in files(output)}
    with pytest.raises(ConfigError, match="broken"), job(output, taps=(3,)).opened(inputs, True):
        raise ConfigError("line 2 is broken")
    assert {path: (output / path).read_bytes() for path in files(output)} == before
    new = job(output, taps=(3,))
    with new.opened(inputs, overwrite=True):
        new.once("samples", dict)
        assert "prepare_job/replaced/prepare.json" in files(output)
        new.publish(dict)
    assert files(output) == ["prepare.json", "prepare_job.json"]


def test_a_command_that_began_meanwhile_is_seen(tmp_path: Path) -> None:
    def while_another_runs() -> dict[str, str]:
        with job(tmp_path / "run", dtype="bfloat16").opened(inputs):
            pass
        return inputs()

    with (
        pytest.raises(ConfigError, match=r'dtype: "bfloat16", here "float32"'),
        job(tmp_path / "run").opened(while_another_runs),
    ):
        pytest.fail("let in")


def test_a_place_that_cannot_be_a_run_folder_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path, place in (
        ("file", "file"),
        ("file/deep/run", "file"),
        ("dangling", "dangling"),
        ("dangling/run", "dangling"),
    ):
        with (
            pytest.raises(ConfigError, match=rf"{path} cannot be .*{place} is no folder; choose"),
            job(tmp_path / path).opened(lambda: pytest.fail("too late")),
        ):
            pytest.fail("let in")
    finish(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda place, how: False)
    with (
        pytest.raises(ConfigError, match=f"{tmp_path} may not be written to; choose another"),
        job(tmp_path / "new" / "run").opened(lambda: pytest.fail("too late")),
    ):
        pytest.fail("let in")
    with job(tmp_path / "run").opened(inputs):
        pass  # A finished run needs no writing.


def test_a_record_without_its_parts_is_damaged(tmp_path: Path) -> None:
    finish(tmp_path / "run")
    for content in (b'{"options": []}', b"\xff", b"[]", b"{"):
        (tmp_path / "run" / "prepare_job.json").write_bytes(content)
        with (
            pytest.raises(ConfigError, match=r"prepare_job.json is damaged .* --overwrite"),
            job(tmp_path / "run").opened(inputs),
        ):
            pytest.fail("let in")


@pytest.mark.parametrize("name", ["prompts.jsonl", "lengths.png"])
def test_a_file_that_is_in_the_way_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with (
        pytest.raises(ConfigError, match="does not say by which command"),
        job(tmp_path).opened(inputs),
    ):
        pytest.fail("let in")
    assert (tmp_path / name).read_text() == "mine"


def test_only_finished_answers_are_worth_keeping(tmp_path: Path) -> None:
    one = job(tmp_path / "run")

    def answer() -> None:
        (one.folder / "answers").mkdir()
        raise ConfigError("no template")

    with pytest.raises(ConfigError, match="no template"), one.opened(inputs):
        answer()
    assert not (tmp_path / "run").exists()
