"""Whole training jobs: torchrun, the real entry point, and what they logged."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """A finished job."""

    returncode: int
    output: str

    def check(self) -> "Job":
        assert self.returncode == 0, self.output[-6000:]
        return self


DRAFTER = ("-m", "megatron_splitkv.pretrain_dflash")


def run_job(
    num_ranks: int,
    argv: Sequence[str],
    *,
    program: Sequence[str] = DRAFTER,
    timeout: float = 600.0,
) -> Job:
    """Run a training script under torchrun; a hang fails the test.

    Args:
        num_ranks: processes.
        argv: arguments of the script.
        program: the script as torchrun takes it, a file or ``-m`` and a module.
        timeout: seconds until the job counts as hung; its processes are ended then.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), *program, *argv),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        # torchrun gives its ranks sessions of their own: they would outlive it, and hold the pipe.
        for rank in psutil.Process(process.pid).children(recursive=True):
            rank.kill()
        process.kill()
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"the job hung for {timeout:g} s\n{output[-6000:]}") from None
        raise
    return Job(process.returncode, output)


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars of a TensorBoard folder, bit for bit: name -> iteration -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if not tag.endswith("vs samples")
    }
