"""What a forward step checks and logs besides the model's own report."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import gloo_pool
from tests.train.launches import make_store
from tests.train.test_dataset import RECIPE, _dataset, _plan


def _compare(plans: list[dict[str, object]]) -> str:
    from megatron_splitkv.train.forward_step import check_same_plan

    plan = ContextPlan.from_arrays(plans[dist.get_rank()])
    try:
        check_same_plan(plan, dist.group.WORLD, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


def test_a5_ranks_with_different_plans_stop_alike(tmp_path: Path) -> None:
    dataset = _dataset(make_store(tmp_path / "store"), 0, 2)
    one, other = _plan(dataset[0]), _plan(dataset[1])
    rebuilt = build_plan(
        one.layout, one.context_length, 2, strategy="none", chunks_per_rank=RECIPE.chunks_per_rank
    )
    same, item, strategy = (
        gloo_pool(2).run(_compare, [one.to_arrays(), second.to_arrays()])
        for second in (one, other, rebuilt)
    )
    assert same == ["", ""]
    for messages in (item, strategy):
        assert messages[0] == messages[1]
        assert "different anchors or plans" in messages[0]


@pytest.mark.parametrize(
    ("reported", "logged"),
    [
        ("lm loss", "drafter loss"),
        ("slot_1_accuracy", "accuracy/slot 1"),
        ("slot_15_accuracy", "accuracy/slot 15"),
        ("accept_len", "accept_len"),
    ],
)
def test_names_in_the_log(reported: str, logged: str) -> None:
    from megatron_splitkv.train.forward_step import _log_name

    assert _log_name(reported) == logged
