"""The state of one `splitkv prepare` on disk: what it was asked for, and how far it is.

While a run is being prepared, its folder holds `prepare_job.json` (the command's options and the
checksums of what it reads) and `prepare_job/` with everything unfinished. The same command finds
them and goes on; another one is refused. What is finished moves to its place by renaming, and
`prepare.json` comes last: with it the run is whole, and `prepare_job/` goes away.

Several processes share the folder and nothing else. The leader holds a lock and keeps touching it;
the others wait for the records that it publishes for as long as it does.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.leader import leading
from megatron_splitkv.data.partial import DiskFullError, full_disk_explained, write_aside
from megatron_splitkv.data.set_aside import SetAside
from megatron_splitkv.data.work import Patience, Worker

JOB_FILE = "prepare_job.json"
JOB_FOLDER = "prepare_job"
SUMMARY_FILE = "prepare.json"
PROMPTS_FILE = "prompts.jsonl"
LENGTHS_FILE = "lengths.png"
_RESULTS = ("train", "valid", PROMPTS_FILE, LENGTHS_FILE)
# What took long to make: a job that is refused before it has any of it leaves nothing behind, nor
# does one whose disk fails before it has any unit.
_WORTH_KEEPING = ("target", "answers/unit-*", "samples.json")
_FINISHED = (*_WORTH_KEEPING, "*/unit-*")
_GO_ON = "give the same command again: what is finished is kept (with --overwrite it begins anew)"

Json = dict[str, Any]


class JobFinishedError(Exception):
    """The leader has finished the run while this process waited for a step of it."""


class PrepareJob:
    """What one process knows of the job in a run folder.

    Args:
        output: the run folder.
        options: what the command asks for; every process can say it at once.
        worker: this process.
        makes_target: whether the job also makes `target/`.
        patience: makes the one that followers wait with.
    """

    def __init__(
        self,
        output: Path,
        options: Json,
        worker: Worker,
        *,
        makes_target: bool = False,
        patience: Callable[[], Patience] = Patience,
    ) -> None:
        self.output = output
        self.folder = output / JOB_FOLDER
        self.worker = worker
        self._lock = self.folder / "leader.lock"
        self._results = (*_RESULTS, "target") if makes_target else _RESULTS
        names = (SUMMARY_FILE, JOB_FILE, *self._results)
        self._replaced = SetAside(output, self.folder, self._lock, names)
        self._options: Json = json.loads(json.dumps(options))
        self._patience = patience

    @property
    def finished(self) -> bool:
        """Whether the run is whole."""
        return (self.output / SUMMARY_FILE).exists()

    @property
    def summary(self) -> Json:
        """The finished run's summary."""
        return read_json(self.output / SUMMARY_FILE)

    def record(self, name: str) -> Path:
        """Where a step's record lies while the job runs."""
        return self.folder / f"{name}.json"

    @contextmanager
    def opened(self, inputs: Callable[[], Json], overwrite: bool = False) -> Iterator[None]:
        """Take part in the job: the leader starts it or goes on with it, the others join.

        A job that is refused before it has made anything worth keeping leaves nothing behind. With
        `overwrite` what the folder held is set aside until the new run is whole, and comes back
        when the job is refused, whatever it has made. (Not when the disk is full or fails: then
        only if it has made nothing worth keeping.)

        Args:
            inputs: checksums of what the command reads; the leader computes them.
            overwrite: replace what the folder holds of an earlier job, finished or not.

        Raises:
            ConfigError: the folder belongs to another command, another process leads a job in it,
                the leader does not show itself, or the disk is full.
        """
        with full_disk_explained(self.output, _GO_ON):
            if self.worker.leads:
                with self._led(inputs, overwrite):
                    yield
            else:
                self._join()
                yield

    def once(self, name: str, make: Callable[[], Json]) -> Json:
        """A step that the leader does once, and whose record every process reads.

        Args:
            name: of the step.
            make: does it. What a killed one left of it must not disturb the next.

        Returns:
            What `make` returned, in this launch of the job or in an earlier one.

        Raises:
            ConfigError: the leader has not shown itself for as long as the patience lasts.
            JobFinishedError: the run is whole, and its records are gone.
        """
        path = self.record(name)
        if self.worker.leads:
            if not path.exists():
                write_json(path, make())
        else:
            self._wait(path.exists)
        try:
            return read_json(path)
        except FileNotFoundError:
            raise JobFinishedError from None

    def publish(self, summary: Callable[[], Json]) -> Json:
        """Move the results to their places and the summary last; the leader only.

        Args:
            summary: says what the finished run holds. Its record makes the job ready: a killed
                move goes on from there.
        """
        self.once("summary", summary)
        for name in self._results:
            if (self.folder / name).exists():
                os.replace(self.folder / name, self.output / name)
        os.replace(self.record("summary"), self.output / SUMMARY_FILE)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.summary

    @property
    def ready(self) -> bool:
        """Whether all work is done, and only `publish` remains."""
        return self.finished or self.record("summary").exists()

    @contextmanager
    def _led(self, inputs: Callable[[], Json], overwrite: bool) -> Iterator[None]:
        if overwrite:
            self._refuse_overwriting_together()
        if overwrite or not self.finished:
            _refuse_closed_place(self.folder)
        if self._replaced.unsettled:
            with leading(self._lock):
                self._replaced.bring_back()
        if not overwrite:
            self._refuse_another(self._options, "options")
        content = {"options": self._options, "inputs": json.loads(json.dumps(inputs()))}
        if not overwrite:
            # Again: another command may have begun while the checksums were computed.
            self._refuse_another(self._options, "options")
            self._refuse_another(content["inputs"], "inputs")
            if self.finished:
                shutil.rmtree(self.folder, ignore_errors=True)
                yield
                return
        made = _make_folders(self.folder)
        with leading(self._lock):
            try:
                with full_disk_explained(self.output, _GO_ON):
                    if overwrite:
                        self._replaced.take()
                    # By way of the job's folder: nothing that a kill leaves outlives the job.
                    write_json(self.folder / JOB_FILE, content)
                    (self.folder / JOB_FILE).rename(self.output / JOB_FILE)
                    yield
            except (ConfigError, OSError) as error:
                if not self._stays(error):
                    # Others may still be writing there; what is left, the next start tidies up.
                    with suppress(OSError):
                        self._replaced.bring_back()
                        _remove_empty(made)
                raise

    def _stays(self, error: Exception) -> bool:
        """Whether the job has something worth keeping; of one that is refused what it replaces."""
        refused = isinstance(error, ConfigError) and not isinstance(error, DiskFullError)
        if refused and self._replaced.folder.exists():
            return False
        names = _WORTH_KEEPING if refused else _FINISHED
        return any(any(self.folder.glob(name)) for name in names)

    def _join(self) -> None:
        waiting = self._patience()
        while differences := self._differences(self._options, "options"):
            if not waiting.lasts(differences):
                raise ConfigError(
                    f"process 0 began no prepare of this command in {self.output} within "
                    f"{waiting.limit / 60:.0f} minutes ({differences}); start all processes with "
                    "the same command"
                )

    def _wait(self, come: Callable[[], bool]) -> None:
        waiting = self._patience()
        while not (come() or self.finished):
            if not waiting.lasts(_changed(self._lock)):
                raise ConfigError(
                    f"process 0 has not shown itself in {self.folder} for "
                    f"{waiting.limit / 60:.0f} minutes; start the same command again: it goes on "
                    "where it stopped"
                )

    def _refuse_overwriting_together(self) -> None:
        if self.worker.world_size > 1:
            raise ConfigError(
                f"--overwrite with {self.worker.world_size} processes could delete what another is "
                f"writing; remove {self.output} first, and start them without it"
            )

    def _refuse_another(self, asked: Json, part: str) -> None:
        """Refuse a folder whose job is another one, naming what differs."""
        if (self.output / JOB_FILE).exists():
            differences = self._differences(asked, part)
            if not differences:
                return
        elif any((self.output / name).exists() for name in (SUMMARY_FILE, *self._results)):
            differences = "it does not say by which command"
        else:
            return
        holds = "already holds a prepared run" if self.finished else "holds an unfinished prepare"
        raise ConfigError(
            f"{self.output} {holds} of another command ({differences}); choose another --output "
            "or add --overwrite"
        )

    def _differences(self, asked: Json, part: str) -> str:
        path = self.output / JOB_FILE
        if not path.exists():
            return "nothing there yet"
        there = read_json(path).get(part)
        if not isinstance(there, dict):
            raise ConfigError(f"{path} is damaged (no {part}); prepare again with --overwrite")
        return ", ".join(
            f"{name}: {_short(there.get(name))}, here {_short(asked.get(name))}"
            for name in sorted({*there, *asked})
            if there.get(name) != asked.get(name)
        )


def write_json(path: Path, content: Json) -> None:
    """Publish a JSON file: whole, or not at all."""
    write_aside(path, json.dumps(content, indent=1).encode() + b"\n")


def read_json(path: Path) -> Json:
    """Read what `write_json` wrote.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); prepare again with --overwrite") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged (no object); prepare again with --overwrite")
    return content


def _short(value: object) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _refuse_closed_place(path: Path) -> None:
    """Refuse a folder that cannot be made or written to before there is any work."""
    place = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not place.is_dir():
        raise ConfigError(
            f"{path.parent} cannot be a run folder: {place} is no folder; choose another --output"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{place} may not be written to; choose another --output")


def _make_folders(path: Path) -> Sequence[Path]:
    """Make a folder; returns those that were not there, the deepest first."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return new


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
