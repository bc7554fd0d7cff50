"""Wherever the disk is full during preparation, one line says so, and the same command goes on."""

import builtins
import errno
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron_splitkv.data.answer_units import AnswerUnits
from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import Prompt, supervised
from megatron_splitkv.data.document_units import Answered
from megatron_splitkv.data.length_report import LengthReport
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.partial import DiskFullError, folder_written_aside, write_aside
from megatron_splitkv.data.prepare import PrepareOptions, prepare
from megatron_splitkv.data.prepare_job import Json, PrepareJob
from megatron_splitkv.data.prepare_target import PrepareTarget
from megatron_splitkv.data.sample_stores import CorpusEntry
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.target_states import StatePiece

TARGET = TargetInfo(
    id="t", checksum="c", num_layers=4, hidden_size=4, vocab_size=32, mask_token_id=31
)
# A shard a document.
OPTIONS = PrepareOptions(device="cpu", max_shard_bytes=1)


class SmallRecipe:
    """Every step of a recipe, without a model: two documents, one of them held out."""

    target: ClassVar[None] = None

    def options(self) -> Json:
        return {"recipe": "small"}

    def check(self, options: PrepareOptions) -> None:
        pass

    def inputs(self, stages: Stages) -> Json:
        return {"text": "abc"}

    def begin(self, target_folder: Path, stages: Stages) -> tuple[Json, Json]:
        if not target_folder.exists():
            with folder_written_aside(target_folder) as aside, open(aside / "weights", "w") as file:
                file.write("w" * 100)
        return {}, {}

    def describe(self, target: PrepareTarget, mask_token_id: int | None) -> TargetInfo:
        return TARGET

    def units(
        self, target: PrepareTarget, info: TargetInfo, facts: Json, plan: Json
    ) -> AnswerUnits:
        def answer(first: int, last: int, progress: Progress) -> list[Answered]:
            tokens = (torch.arange(5 + number) for number in range(first, last))
            return [Answered(Encoded(supervised(ids, 2), 2)) for ids in tokens]

        return AnswerUnits(2, 2, answer)

    def entries(
        self,
        target: PrepareTarget,
        info: TargetInfo,
        facts: Json,
        documents: Iterator[Answered],
        progress: Progress,
    ) -> Iterator[CorpusEntry]:
        for number, document in enumerate(documents):
            prompt = Prompt("p", "text", [1, 2]) if number else None
            yield CorpusEntry("valid" if number else "train", document.encoded, prompt)

    def taps(
        self, target: PrepareTarget, options: PrepareOptions, job: PrepareJob
    ) -> tuple[int, ...]:
        return (1, 2)

    def states(
        self, target: PrepareTarget, meta: StoreMeta, options: PrepareOptions, samples: Json
    ) -> "SmallRecipe":
        return self

    def read(
        self, store: str, documents: range, token_ids: Sequence[torch.Tensor], progress: Progress
    ) -> Iterator[StatePiece]:
        for document, ids in enumerate(token_ids):
            features = ids[:, None].float() * torch.ones(8)
            yield StatePiece(document, 0, features, torch.empty(0))


@pytest.fixture(autouse=True)
def without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.ones(32, 4)
    monkeypatch.setattr(PrepareTarget, "frozen", lambda self: (embedding, embedding))
    monkeypatch.setattr(LengthReport, "draw", lambda self, path: write_aside(Path(path), b"png"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class FullDisk:
    """Takes some changes and then no more: of contents, of names, or the first of them alone.

    Args:
        room: changes that it takes.
        folder: where it is full.
        once: whether there is room again behind the first refusal.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, room: int, folder: Path, *, once: bool
    ) -> None:
        self.room, self.once, self.folder = room, once, str(folder)
        for name in ("pwrite", "ftruncate", "mkdir", "replace", "rename"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self._open)
        monkeypatch.setattr(io, "open", self._open)

    def take(self, *files: Any) -> None:
        self.room -= 1
        if self.room == -1 or (self.room < 0 and not self.once):
            raise OSError(errno.ENOSPC, "No space left on device", *map(str, files))

    def _counting(self, call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            self.take(*args[: 0 if isinstance(args[0], int) else 1])
            return call(*args, **options)

        return counting

    def _open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa") or not str(file).startswith(self.folder):
            return OPEN(file, mode, *args, **options)
        self.take(file)
        if mode != "w":
            return OPEN(file, mode, *args, **options)
        disk = self

        class Raw(io.FileIO):
            def write(self, content: Any) -> int:
                disk.take()
                return super().write(content)

        return io.TextIOWrapper(io.BufferedWriter(Raw(file, "w")))


OPEN = open


def tree(output: Path) -> dict[str, bytes]:
    """All files but the lock; the summary without its seconds."""
    found = {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != "leader.lock"
    }
    if "prepare.json" in found:
        summary = json.loads(found["prepare.json"])
        del summary["seconds"]
        found["prepare.json"] = json.dumps(summary).encode()
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_wherever_the_disk_is_full_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    prepare(SmallRecipe(), tmp_path / "whole", OPTIONS)
    expected = tree(tmp_path / "whole")
    assert len(expected) == 10
    old = {"prepare.json": b'{"old": 1}', "train/index.json": b"{}", "prepare_job.json": b"{}"}
    lines, kept = set[str](), 0
    for room in range(1000):
        output, once = tmp_path / str(room), room % 2 == overwrite
        for name, content in old.items() if overwrite else ():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_bytes(content)
        with monkeypatch.context() as patch:
            FullDisk(patch, room, output, once=once)
            try:
                prepare(SmallRecipe(), output, OPTIONS, overwrite=overwrite)
            except DiskFullError as error:
                line = str(error)
            else:
                break
        assert "\n" not in line
        assert line.startswith("no space left in ")
        assert "then give the same command again: what is finished is kept" in line
        lines.add(line.split(" (")[0].replace(str(output), "RUN"))
        kept += (output / "prepare_job" / "samples.json").exists()
        if once:
            assert not list(output.rglob("*.partial"))
        record = output / "prepare_job.json"
        begun = record.exists() and b"small" in record.read_bytes()
        prepare(SmallRecipe(), output, OPTIONS, overwrite=overwrite and not begun)
        assert tree(output) == expected
    assert room > 50
    assert kept > 20
    for file in ("lengths.png", "samples.json", "target.json", "unit-000000.safetensors"):
        assert any(line.endswith(f" for {file}") for line in lines), lines
    assert tree(output) == expected
