"""A plain GPT script trains on two ranks with split-KV as on one with Megatron's attention."""

from pathlib import Path

import pytest

from tests.distributed.jobs import logged, run_job

pytestmark = pytest.mark.job

STEPS = 5
COMMON = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--seq-length", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-2"),
    *("--train-iters", str(STEPS), "--tensorboard-log-interval", "1"),
)
SPEC = ("--spec", "megatron_splitkv.gpt_specs", "local_layer")


def _train(folder: Path, cp: int, *options: str) -> dict[str, dict[int, float]]:
    run_job(
        cp,
        [*COMMON, "--context-parallel-size", str(cp), "--tensorboard-dir", str(folder), *options],
        program=("examples/pretrain_gpt_splitkv.py",),
    ).check()
    log = logged(folder)
    assert sorted(log["lm loss"]) == list(range(1, STEPS + 1))
    return log


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Stock layers, whose attention knows no context parallelism."""
    log = _train(tmp_path_factory.mktemp("gpt"), 1)
    assert log["lm loss"][STEPS] < log["lm loss"][1] - 0.2  # it does learn
    return log


@pytest.mark.parametrize("layers", [SPEC, ()], ids=["--spec", "enable()"])
def test_two_ranks_train_alike(
    one_process: dict[str, dict[int, float]], layers: tuple[str, ...], tmp_path: Path
) -> None:
    log = _train(tmp_path, 2, "--cp-comm-type", "splitkv", *layers)
    for name in ("lm loss", "grad-norm"):
        for step, value in log[name].items():
            # A wrong scale or a missing sum shows at once; later steps add up rounding.
            rel = 1e-5 if step <= 2 else 1e-4
            assert value == pytest.approx(one_process[name][step], rel=rel), (name, step)
