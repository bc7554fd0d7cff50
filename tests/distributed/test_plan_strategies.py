"""Who holds which rows changes no number: a training step under every plan strategy."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from megatron_splitkv.config import PLAN_STRATEGIES
from tests.distributed.test_drafter_step import TOLERANCE, assert_same_step, truth
from tests.drafter.harness import StepResult, awkward_samples, on_ranks, train_step

# Ranks that import Megatron on a busy machine take their time.

INSTALLED = [name for name in PLAN_STRATEGIES if name != "hypergraph" or find_spec("kahypar")]


def steps(strategies: Sequence[str]) -> list[StepResult]:
    return [
        train_step([replace(s, strategy=name) for s in awkward_samples()], tp=1, cp=4)
        for name in strategies
    ]


def test_every_plan_strategy_gives_the_loss_and_gradients_of_the_plain_twin() -> None:
    digests = {
        name: tuple(replace(s, strategy=name).plan(4).digest for s in awkward_samples())
        for name in INSTALLED
    }
    assert len(set(digests.values())) > len(INSTALLED) // 2  # they do differ
    for name, step in zip(INSTALLED, on_ranks(4, steps, INSTALLED)[0], strict=True):
        try:
            assert_same_step(step, truth(), TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
