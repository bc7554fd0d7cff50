"""One drafter of the quality study, trained as a user would: torchrun and the package's entry."""

import os
import re
import subprocess
import sys
from pathlib import Path

from megatron_splitkv.bench.quality_data import store_folder
from megatron_splitkv.bench.quality_shape import Point, QualityShape
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import Progress

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_HEADS, _KV_HEADS, _HEAD_WIDTH, _FFN = 4, 2, 24, 288
_ENVIRONMENT = {
    # Threads that spin while they wait make a busy machine several times slower.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def training_command(shape: QualityShape, point: Point, data: Path, checkpoints: Path) -> list[str]:
    """The torchrun line of one drafter.

    A step is one pack. All samples of a store are equally long, so a pack of `samples` times
    their length holds exactly that many: every point sees as many samples a step.

    Args:
        shape: of the study.
        point: what this drafter differs in.
        data: folder of `prepare_quality`.
        checkpoints: Megatron's ``--save``; training goes on from what lies there.
    """
    options = {
        "--context-parallel-size": shape.ranks,
        "--cp-comm-type": "splitkv",
        "--feature-store": store_folder(data, point.context),
        "--seq-length": shape.samples * point.context,
        "--num-anchors": point.anchors,
        "--block-size": shape.block_size,
        "--loss-decay-gamma": shape.block_size / 2,
        "--num-layers": shape.layers,
        "--num-attention-heads": _HEADS,
        "--num-query-groups": _KV_HEADS,
        "--kv-channels": _HEAD_WIDTH,
        "--ffn-hidden-size": _FFN,
        "--lr": shape.learning_rate,
        "--weight-decay": 0.1,
        "--clip-grad": 1.0,
        "--global-batch-size": 1,
        "--train-iters": shape.steps,
        "--log-interval": max(1, shape.steps // 50),
        "--save-interval": max(1, shape.steps // 2),
        "--seed": 1 + shape.seed,  # Megatron wants a positive one
        "--save": checkpoints,
        "--load": checkpoints,
    }
    # As a module: the environment's own, whatever is on PATH.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    module = ["-m", "megatron_splitkv.pretrain_dflash", "--calculate-per-token-loss"]
    arguments = [str(part) for pair in options.items() for part in pair]
    return [*torchrun, "--nproc-per-node", str(shape.ranks), *module, *arguments]


def train_drafter(
    shape: QualityShape, point: Point, data: Path, checkpoints: Path, progress: Progress
) -> None:
    """Train one drafter, its log beside the checkpoints.

    Args:
        shape: of the study.
        point: of the drafter.
        data: folder of `prepare_quality`.
        checkpoints: Megatron's ``--save``.
        progress: told the steps done.

    Raises:
        ConfigError: the job failed; its reason, and where its log is.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    log = checkpoints.with_name("train.log")
    command = training_command(shape, point, data, checkpoints)
    progress(0, shape.steps)
    with (
        open(log, "a") as file,
        subprocess.Popen(
            command,
            env=_ENVIRONMENT | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        assert job.stdout is not None
        try:
            for line in job.stdout:
                file.write(line)
                file.flush()
                if match := _ITERATION.search(line):
                    progress(int(match[1]), int(match[2]))
        except BaseException:
            job.terminate()  # or leaving the block would wait for its end
            raise
    if job.returncode:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        reason = next((line for line in reversed(said) if line.startswith("error: ")), said[-1])
        raise ConfigError(
            f"training of {point.name} ended with exit code {job.returncode}: {reason} (log: {log})"
        )
