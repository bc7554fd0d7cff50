"""What one layer moves between ranks: the published formula, to the element."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import CommMeter
from megatron_splitkv.testing import gloo_pool, subgroup
from tests.distributed.attention_problem import Problem, attend_sharded

PROBLEM = Problem(
    document_lengths=(96, 31),
    anchors=((10, 33, 50, 71, 72, 95), (5, None, 30)),
    num_heads=6,
    num_key_heads=3,
    dtype=torch.bfloat16,
)


def _measure(problem: Problem, cp_size: int) -> list[tuple[str, str, float, Any]] | None:
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return None
    plan = problem.plan(cp_size)
    with CommMeter() as meter:
        attend_sharded(problem, plan, problem.tensors(plan), group)
    return [(r.op, r.label, r.elements, r.dtype) for r in meter.records]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_elements_per_layer_equal_the_formula(cp_size: int, dtype: torch.dtype) -> None:
    problem = replace(PROBLEM, dtype=dtype)
    num_queries = problem.plan(cp_size).layout.num_blocks * problem.block_size  # Q
    share = (cp_size - 1) / cp_size  # f
    rows = num_queries * problem.num_heads * problem.head_width * share  # Q n_q d f
    stats = num_queries * problem.num_heads * share  # Q n_q f
    forward = [
        ("all_gather", "q", rows, dtype),
        ("all_reduce_max", "lse_max", 2 * stats, torch.float32),
        ("all_reduce_sum", "lse_sum", 2 * stats, torch.float32),
        ("all_to_all", "out", rows, dtype),
    ]
    backward = [
        ("all_gather", "grad_out", rows, dtype),
        ("all_gather", "delta", stats, torch.float32),
        ("all_to_all", "grad_q", rows, dtype),
    ]
    answers = gloo_pool(4).run(_measure, problem, cp_size)
    for records in answers[:cp_size]:
        assert len(records) == 7
        for record, expected in zip(records, forward + backward, strict=True):
            assert (record[0], record[1], record[3]) == (expected[0], expected[1], expected[3])
            assert record[2] == pytest.approx(expected[2], rel=1e-12)


def test_traffic_does_not_grow_with_the_context() -> None:
    longer = replace(
        PROBLEM,
        document_lengths=tuple(8 * n for n in PROBLEM.document_lengths),
        anchors=tuple(tuple(None if a is None else 8 * a for a in row) for row in PROBLEM.anchors),
    )
    assert longer.context_length == 8 * PROBLEM.context_length
    short, long = (gloo_pool(4).run(_measure, p, 4) for p in (PROBLEM, longer))
    assert long == short


def test_one_rank_moves_nothing() -> None:
    assert gloo_pool(4).run(_measure, PROBLEM, 1)[0] == []


def test_traffic_does_not_depend_on_what_a_rank_sees() -> None:
    # One block at the front of a contiguous split: three ranks see nothing, yet all take part.
    lonely = Problem(document_lengths=(64,), anchors=((10,),), strategy="none", chunks_per_rank=1)
    answers = gloo_pool(4).run(_measure, lonely, 4)
    assert len(answers[0]) == 7
    assert all(records == answers[0] for records in answers)
