"""Stages of a quick start: commands that are shown, watched, remembered and not run twice."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_splitkv.cli.progress_lines import progress_lines

ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*(\d+) \|.*?drafter loss: ([\d.E+-]+) \| accept_len: ([\d.E+-]+)"
)
console = Console()


class Stages:
    """Runs the stages of one output folder and remembers which are finished."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.file = output / "stages.json"
        self.done: dict[str, dict[str, Any]] = (
            json.loads(self.file.read_text()) if self.file.exists() else {}
        )
        self.key = ""

    def run(
        self, name: str, command: list[str], writes: Path, *, threads: int, watch: bool = False
    ) -> None:
        """Run a command as a stage, or skip it if it finished before with the same history.

        A stage that was begun with the same history goes on with what it wrote; one whose command
        or history has changed starts without it.

        Args:
            name: of the stage.
            command: what to run.
            writes: file or folder that the stage leaves.
            threads: of each process.
            watch: the command is a training job.

        Raises:
            SystemExit: the command failed; its exit code is passed on.
        """
        content = self.key + json.dumps([name, command])
        self.key = hashlib.sha256(content.encode()).hexdigest()
        console.rule(f"[bold]{name}")
        console.print(as_typed(command), style="dim", highlight=False)
        before = self.done.get(name, {})
        if before.get("key") == self.key and "seconds" in before and writes.exists():
            console.print("finished before; not run again (--fresh starts anew)")
            return
        if before.get("key") != self.key and writes.exists():
            console.print(f"removing {writes}: it is of another run", style="dim")
            shutil.rmtree(writes) if writes.is_dir() else writes.unlink()
        self._note(name, {"key": self.key})
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait make a busy machine several times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        start = time.perf_counter()
        code = watch_training(command, env, self.output) if watch else call(command, env)
        if code:
            console.print(f"[red]{name} failed with exit code {code}")
            sys.exit(code)
        self._note(name, {"key": self.key, "seconds": round(time.perf_counter() - start, 1)})

    def _note(self, name: str, state: dict[str, Any]) -> None:
        self.done[name] = state
        aside = self.file.with_suffix(".partial")
        aside.write_text(json.dumps(self.done, indent=1))
        aside.replace(self.file)


def as_typed(command: list[str]) -> str:
    """The command as a user of the environment would type it."""
    typed = shlex.join(command).replace(sys.executable, "python")
    typed = typed.replace("python -m megatron_splitkv ", "splitkv ", 1)
    return typed.replace("python -m torch.distributed.run", "torchrun", 1)


def call(command: list[str], env: dict[str, str]) -> int:
    """Run a command that shows its own progress."""
    return subprocess.run(command, env=env, check=False).returncode


def watch_training(command: list[str], env: dict[str, str], output: Path) -> int:
    """Run the training job with its log in a file and its progress on the screen."""
    log = output / "train.log"
    console.print(f"log: {log}", style="dim")
    last = 0
    resumes = (output / "checkpoints").exists()
    with (
        open(log, "a" if resumes else "w") as file,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job,
        shown_steps() as show,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            file.write(line)
            file.flush()
            if match := ITERATION.search(line):
                last = int(match[2])
                show(int(match[1]), last, float(match[3]))
        if job.wait() == 0 and last:
            show(last, last, None)
    if job.returncode:
        lines = log.read_text().splitlines()
        reasons = [line for line in lines if line.startswith("error: ")] or lines[-25:]
        console.print("\n".join(reasons), markup=False)
    return job.returncode


@contextmanager
def shown_steps() -> Iterator[Callable[[int, int, float | None], None]]:
    """A bar of training steps, or plain lines where nothing can be drawn.

    Returns:
        What shows steps done, steps in all and the loss, or None for the last loss again.
    """
    if not console.is_interactive:
        with progress_lines(lambda line: print(line, flush=True)) as lines:
            report = lines.watch("training steps")
            yield lambda done, total, loss: report(done, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=None)

        def show(done: int, total: int, loss: float | None) -> None:
            told = {} if loss is None else {"description": f"loss {loss:.3f}"}
            progress.update(bar, completed=done, total=total, **told)

        yield show
