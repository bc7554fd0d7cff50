"""The pictures are drawn, whatever is missing, and pyplot's global state is left alone."""

import sys
from pathlib import Path

import pytest

from megatron_splitkv.evaluate import EvaluationResult
from megatron_splitkv.evaluate.greedy import Comparison
from megatron_splitkv.evaluate.plots import Curve, TrainingCurves, draw_acceptance, draw_training
from megatron_splitkv.evaluate.result import METHODS
from megatron_splitkv.evaluate.speculative import DraftStep


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("block_size", [2, 32])
def test_acceptance(prompts: int, block_size: int, tmp_path: Path) -> None:
    steps = [[DraftStep(1, 1, 2), DraftStep(0, 0, 1)]] * prompts
    result = EvaluationResult(
        prompt_ids=[str(i) for i in range(prompts)],
        prompt_lengths=[100 * 3**i for i in range(prompts)],
        truncated_tokens=[0] * prompts,
        steps=dict.fromkeys(METHODS, steps),
        comparisons=[Comparison(True)] * prompts,
        block_size=block_size,
        num_proposals=block_size - 1,
        max_new_tokens=4,
    )
    assert result.accept_len["trained"] == 1.5
    assert result.slot_acceptance("trained")[:2] == [1.0, None][: block_size - 1]
    had_pyplot = "matplotlib.pyplot" in sys.modules
    draw_acceptance(result, tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_training_with_and_without_validation(tmp_path: Path) -> None:
    loss = Curve([1, 2, 3], [3.0, 2.0, 1.5])
    for name, curves in (
        ("short", TrainingCurves(loss)),
        ("long", TrainingCurves(loss, Curve([3], [1.6]), loss, Curve([3], [1.2]))),
    ):
        draw_training(curves, tmp_path / f"{name}.png")
    assert (tmp_path / "short.png").stat().st_size < (tmp_path / "long.png").stat().st_size
