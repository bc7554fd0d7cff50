"""A target in the job of a recipe: it trains and evaluates as a store of its features does."""

import re
from pathlib import Path

import pytest

from tests.distributed.jobs import Job, run_job
from tests.recipes.environment import needs_bridge
from tests.recipes.tiny import make_online_stores

pytestmark = [pytest.mark.job, needs_bridge]

STEPS = 3
BRIDGE = ("-m", "tests.recipes.train_job")
TWO_RANKS = ("model.transformer.context_parallel_size=2", f"train.train_iters={STEPS}")


def _logged(job: Job) -> list[tuple[str, float]]:
    """The drafter's report in the log, of every step and of the validation at the end."""
    names = "drafter loss|accept_len|trained tokens per pack"
    found = re.findall(rf"\| ({names})(?: value)?: ([-+.\dE]+)", job.output)
    assert len(found) == 3 * (STEPS + 1)
    return [(name, float(value)) for name, value in found]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return make_online_stores(tmp_path_factory.mktemp("online"))


@pytest.fixture(scope="module")
def offline(stores: dict[str, list[str]]) -> list[tuple[str, float]]:
    job = run_job(2, ["qwen3-8b", *stores["features"], *TWO_RANKS], program=BRIDGE).check()
    assert "target bytes" not in job.output
    logged = _logged(job)
    assert len({value for name, value in logged if name == "drafter loss"}) == STEPS + 1
    return logged


@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_losses_are_those_of_a_store(
    stores: dict[str, list[str]], offline: list[tuple[str, float]], backend: str
) -> None:
    run = ["qwen3-8b", *stores["tokens"], *TWO_RANKS, f"dataset.online_target_backend={backend}"]
    job = run_job(2, run, program=BRIDGE).check()
    assert "| target bytes: " in job.output
    for (name, online), (expected_name, expected) in zip(_logged(job), offline, strict=True):
        assert name == expected_name
        assert online == pytest.approx(expected, rel=1e-5), name


def test_two_ranks_refuse_contradictory_options_in_one_line(
    stores: dict[str, list[str]], tmp_path: Path
) -> None:
    """Before any collective: no process group is made, and nothing is left behind."""
    save = tmp_path / "checkpoints"
    run = [
        *("qwen3-8b", *stores["features"], *TWO_RANKS, f"checkpoint.save={save}"),
        "dataset.online_target_backend=hf",
    ]
    job = run_job(2, run, program=BRIDGE)
    assert job.returncode != 0
    lines = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: dataset.online_target_backend is for a target in the job: add "
        "dataset.online_target FOLDER, or drop it (the feature store has its layers)"
    ]
    assert "initializing torch distributed" not in job.output
    assert not save.exists()
