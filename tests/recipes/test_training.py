"""Bridge's real training loop on the CPU: the same drafter as Megatron's own loop trains."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_splitkv.export import export_drafter, read_drafter
from tests.distributed.jobs import run_job
from tests.recipes.environment import needs_bridge
from tests.recipes.tiny import make_stores
from tests.train.launches import TINY_DRAFTER

pytestmark = [pytest.mark.job, needs_bridge]

STEPS, SAVED_AT = 3, 2
BRIDGE = ("-m", "tests.recipes.train_job")


@dataclass(frozen=True)
class Trained:
    """A run of the recipe at cp = 2, two packs a step."""

    folder: Path
    overrides: list[str]
    output: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def _weights(checkpoints: Path, scratch: Path) -> dict[str, torch.Tensor]:
    iteration = export_drafter(checkpoints, scratch)
    assert iteration.name == f"iter_{STEPS:07d}"
    return read_drafter(scratch)[1]


def _losses(output: str) -> list[float]:
    """Training losses of the log, one a step, and that of the validation at the end."""
    losses = [float(value) for value in re.findall(r"drafter loss(?: value)?: ([-+.\dE]+)", output)]
    assert len(losses) == STEPS + 1
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("bridge")
    overrides = [*make_stores(folder), f"train.train_iters={STEPS}"]
    run = [
        *("qwen3-8b", *overrides, "model.transformer.context_parallel_size=2"),
        *(f"checkpoint.save={folder / 'checkpoints'}", f"checkpoint.save_interval={SAVED_AT}"),
    ]
    job = run_job(2, run, program=BRIDGE).check()
    return Trained(folder, overrides, job.output)


def test_a_run_logs_the_drafters_report(trained: Trained) -> None:
    for name in ("drafter loss", "accept_len", "accuracy/slot 3", "bytes per layer"):
        assert f"| {name}: " in trained.output
        assert f"| {name} value: " in trained.output  # of the validation
    assert "Theoretical memory" not in trained.output  # a GPT's


def test_the_recipes_own_precision_and_optimizer_train_too(trained: Trained) -> None:
    """bf16, distributed optimizer, overlapped reduction and gather; over tensor parallelism."""
    run = [
        *("qwen3-8b", *trained.overrides, "model.transformer.context_parallel_size=1"),
        *("model.transformer.tensor_model_parallel_size=2", "mixed_precision=bf16_mixed"),
        *("ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"),
        "optimizer.use_distributed_optimizer=true",
    ]
    job = run_job(2, run, program=BRIDGE).check()
    assert _losses(job.output) == pytest.approx(_losses(trained.output), rel=2e-3)


def test_both_training_loops_make_the_same_drafter(trained: Trained, tmp_path: Path) -> None:
    """Same packs, anchors, first weights, schedule and gradients: bit for bit."""
    arguments = [
        *TINY_DRAFTER,
        *("--context-parallel-size", "2", "--train-iters", str(STEPS), "--global-batch-size", "2"),
        *("--feature-store", str(trained.folder / "train"), "--save", str(tmp_path / "megatron")),
    ]
    run_job(2, arguments).check()
    ours = _weights(trained.checkpoints, tmp_path / "bridge")
    theirs = _weights(tmp_path / "megatron", tmp_path / "exported")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_replicas_get_the_packs_that_megatrons_own_loop_deals_them(
    trained: Trained, tmp_path: Path
) -> None:
    """Four packs a step for two replicas: bit for bit, and other sums if they were not dealt."""
    run = [
        *("qwen3-8b", *trained.overrides, "model.transformer.context_parallel_size=1"),
        *("train.global_batch_size=4", f"checkpoint.save={tmp_path / 'bridge'}"),
    ]
    run_job(2, run, program=BRIDGE).check()
    arguments = [
        *TINY_DRAFTER,
        *("--train-iters", str(STEPS), "--global-batch-size", "4"),
        *("--feature-store", str(trained.folder / "train"), "--save", str(tmp_path / "megatron")),
    ]
    run_job(2, arguments).check()
    ours = _weights(tmp_path / "bridge", tmp_path / "ours")
    theirs = _weights(tmp_path / "megatron", tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_resumes_on_another_layout(trained: Trained, tmp_path: Path) -> None:
    run = [
        *("qwen3-8b", *trained.overrides, "model.transformer.context_parallel_size=1"),
        *(f"checkpoint.load={trained.checkpoints}", f"checkpoint.ckpt_step={SAVED_AT}"),
        f"checkpoint.save={tmp_path / 'resumed'}",
    ]
    job = run_job(1, run, program=BRIDGE).check()
    assert f"Starting training loop at iteration {SAVED_AT}" in job.output
    whole = _weights(trained.checkpoints, tmp_path / "whole")
    resumed = _weights(tmp_path / "resumed", tmp_path / "exported")
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name], rtol=0, atol=1e-6)
