"""Strategy `auto` of one call: what the estimate says, on all ranks, and exact whatever it is."""

from dataclasses import replace

import pytest

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.testing import gloo_pool, relative_error
from tests.distributed.attention_problem import NAMES, Problem, assemble, attend_global, solve
from tests.distributed.test_strategies import MIXED

SLOW_LINKS = replace(PRESETS["loopback"], intra_bandwidth=1e3, attention_flops=1e18)


def moved_labels(problem: Problem, cp_size: int) -> set[str]:
    with CommMeter() as meter:
        solve(problem, cp_size)
    return {record.label for record in meter.records}


@pytest.mark.parametrize(
    ("problem", "strategy", "label"),
    [
        # 5 blocks of 4 rows over 490 rows: queries are little.
        (Problem((400, 90), ((50, 300, 399), (20, 89))), "splitkv", "lse_and_delta"),
        # One key head for eight query heads: keys are less.
        (replace(MIXED, num_heads=8, num_key_heads=1), "all_gather", "grad_k"),
    ],
)
def test_auto_equals_one_process(problem: Problem, strategy: str, label: str) -> None:
    options = SplitKVOptions(links=SLOW_LINKS)
    auto = replace(problem, comm="auto", strategy="balanced", options=options)
    plan = auto.plan(3)  # no strategy that needs divisible heads
    shares = gloo_pool(4).run(solve, auto, 3)[:3]
    truth = attend_global(auto, plan, auto.tensors(plan))
    for name, found, expected in zip(NAMES, assemble(plan, shares), truth, strict=True):
        assert relative_error(found, expected) < 1e-12, name
    moved = gloo_pool(4).run(moved_labels, auto, 3)[:3]
    assert moved[0] == moved[1] == moved[2]
    assert label in moved[0]
    named = gloo_pool(4).run(moved_labels, replace(auto, comm=strategy), 3)[0]
    assert moved[0] == named
