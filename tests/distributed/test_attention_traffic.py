"""What one layer moves between ranks: the published formula, to the element."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions
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


def _formula(
    problem: Problem, cp_size: int, wire: torch.dtype
) -> list[tuple[str, str, float, torch.dtype]]:
    """Collectives of a layer in order; `problem.options` with every query to every rank."""
    num_queries = problem.plan(cp_size).layout.num_blocks * problem.block_size  # Q
    share = (cp_size - 1) / cp_size  # f
    rows = num_queries * problem.num_heads * problem.head_width * share  # Q n_q d f
    stats = num_queries * problem.num_heads * share  # Q n_q f
    again = [("all_gather", "q", rows, problem.dtype)] * (problem.options.save == "own")
    return [
        ("all_gather", "q", rows, problem.dtype),
        ("all_to_all", "lse", stats, torch.float32),
        ("all_to_all", "out", rows, wire),
        ("all_gather", "lse_and_delta", 2 * stats, torch.float32),
        ("all_gather", "grad_out", rows, problem.dtype),
        *again,
        ("all_to_all", "grad_q", rows, wire),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("save", ["gathered", "own"])
@pytest.mark.parametrize("fp32_reduce", [False, True])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_elements_per_layer_equal_the_formula(
    cp_size: int, fp32_reduce: bool, save: str, dtype: torch.dtype
) -> None:
    options = SplitKVOptions(query_cast="all", save=save, fp32_reduce=fp32_reduce)
    problem = replace(PROBLEM, dtype=dtype, options=options)
    expected = _formula(problem, cp_size, torch.float32 if fp32_reduce else dtype)
    answers = gloo_pool(4).run(_measure, problem, cp_size)
    for records in answers[:cp_size]:
        assert [(r[0], r[1], r[3]) for r in records] == [(e[0], e[1], e[3]) for e in expected]
        assert [r[2] for r in records] == pytest.approx([e[2] for e in expected], rel=1e-12)


# Four documents on pairs of eight ranks: the keys of each lie on the ranks that own its blocks.
GROUPED = Problem(
    document_lengths=(64, 64, 64, 64),
    anchors=((49, 53, 58, 63),) * 4,
    dtype=torch.bfloat16,
    strategy="balanced-local",
    chunks_per_rank=2,
    options=SplitKVOptions(query_cast="group"),
)


def test_group_cast_moves_a_seventh_of_four_documents_on_eight_ranks() -> None:
    rows = 2 * GROUPED.block_size * GROUPED.num_heads * GROUPED.head_width  # of one rank
    stats = 2 * GROUPED.block_size * GROUPED.num_heads
    for records in gloo_pool(8).run(_measure, GROUPED, 8):
        assert records == [
            ("all_to_all_v", "q", rows, torch.bfloat16),
            ("all_to_all_v", "lse", stats, torch.float32),
            ("all_to_all_v", "out", rows, torch.bfloat16),
            ("all_to_all_v", "lse_and_delta", 2 * stats, torch.float32),
            ("all_to_all_v", "grad_out", rows, torch.bfloat16),
            ("all_to_all_v", "grad_q", rows, torch.bfloat16),
        ]
    everyone = _formula(replace(GROUPED, options=SplitKVOptions()), 8, torch.bfloat16)
    assert 7 * rows == everyone[0][2]
    plan = GROUPED.plan(8)  # and a rank holds a quarter of the queries
    assert {plan.query_cast(rank, "group").blocks.size for rank in range(8)} == {4}
    assert plan.num_blocks == 16


@pytest.mark.parametrize("strategy", ["none", "lpt", "balanced-local"])
def test_group_cast_moves_what_the_plan_says(strategy: str) -> None:
    problem = replace(PROBLEM, strategy=strategy, options=SplitKVOptions(query_cast="group"))
    plan = problem.plan(3)
    per_block = problem.block_size * problem.num_heads * problem.head_width
    for rank, records in enumerate(gloo_pool(4).run(_measure, problem, 3)[:3]):
        sent = received = 0
        for other in set(range(3)) - {rank}:
            start, end = plan.key_ranges(other)
            sent += int((start < end)[plan.blocks(rank)].sum())
            start, end = plan.key_ranges(rank)
            received += int((start < end)[plan.blocks(other)].sum())
        elements = {(r[0], r[1]): r[2] for r in records}
        assert elements["all_to_all_v", "q"] == elements["all_to_all_v", "grad_out"]
        assert elements["all_to_all_v", "q"] == sent * per_block
        assert elements["all_to_all_v", "out"] == elements["all_to_all_v", "grad_q"]
        assert elements["all_to_all_v", "out"] == received * per_block
        assert len(records) == 6


def test_auto_casts_to_groups_only_where_that_moves_clearly_less() -> None:
    assert GROUPED.plan(8).resolve_cast("auto") == "group"
    spread = replace(GROUPED, strategy="balanced", chunks_per_rank=16)  # of every document
    assert spread.plan(8).resolve_cast("auto") == "all"
    assert GROUPED.plan(1).resolve_cast("auto") == "all"


def test_traffic_does_not_grow_with_the_context() -> None:
    shorter = replace(PROBLEM, chunks_per_rank=1)  # queries go where keys are: one plan for both
    longer = replace(
        shorter,
        document_lengths=tuple(8 * n for n in PROBLEM.document_lengths),
        anchors=tuple(tuple(None if a is None else 8 * a for a in row) for row in PROBLEM.anchors),
    )
    assert longer.context_length == 8 * shorter.context_length
    short, long = (gloo_pool(4).run(_measure, p, 4) for p in (shorter, longer))
    assert long == short


def test_one_rank_moves_nothing() -> None:
    assert gloo_pool(4).run(_measure, PROBLEM, 1)[0] == []


def test_traffic_does_not_depend_on_what_a_rank_sees() -> None:
    # One block at the front of a contiguous split: three ranks see nothing, yet all take part.
    lonely = Problem(
        document_lengths=(64,),
        anchors=((10,),),
        strategy="none",
        chunks_per_rank=1,
        options=SplitKVOptions(query_cast="all"),
    )
    answers = gloo_pool(4).run(_measure, lonely, 4)
    assert len(answers[0]) == 6
    assert all(records == answers[0] for records in answers)
