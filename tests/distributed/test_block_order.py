"""Draft blocks dealt out mirrored: every strategy stays exact, and moves what it moved."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.strategies.volumes import volume
from megatron_splitkv.config import CP_COMM_TYPES
from tests.distributed.test_strategies import MIXED, assert_within, cases_of
from tests.distributed.test_strategies_traffic import (
    EMPTY_SHARDS,
    UNEVEN,
    in_order,
    joined,
    measured,
    shape_of,
)

MIRRORED = replace(MIXED, block_order="mirrored")
PLANS = ("none", "zigzag", "balanced", "balanced-local")


@pytest.mark.parametrize("comm", CP_COMM_TYPES)
def test_fp64_equals_one_process_at_odd_and_even_ranks(comm: str) -> None:
    plans = [replace(MIRRORED, comm=comm, strategy=strategy) for strategy in PLANS]
    # 20 blocks with 5 of padding, more of it where 20 does not divide.
    cases = [case for p in plans for case in cases_of(p, 2, 3, 4)]
    for options in (SplitKVOptions(query_cast=cast) for cast in ("all", "group")):
        if comm == "splitkv":
            cases += [(replace(p, options=options), 3) for p in plans]
    cases += cases_of(replace(MIRRORED, comm=comm, window=6, kernel="naive"), 3)
    assert_within(cases, 1e-12)


def test_fp32_at_five_and_seven_ranks() -> None:
    cases = [
        case
        for comm in CP_COMM_TYPES
        for case in cases_of(replace(MIRRORED, comm=comm, dtype=torch.float32), 5, 7)
    ]
    assert_within(cases, 1.5e-6, ranks=8)


def test_volumes_are_those_of_blocks_in_their_order() -> None:
    options = {"splitkv": SplitKVOptions(query_cast="all")}
    problems = [
        replace(p, comm=comm, options=options.get(comm, SplitKVOptions()))
        for comm in CP_COMM_TYPES
        for p in (UNEVEN, EMPTY_SHARDS)
    ]
    cases = [(replace(p, block_order="mirrored"), 4) for p in problems]
    for problem, cp_size, rank, forward, backward in measured(cases):
        plain = replace(problem, block_order="contiguous", strategy="none")
        mirrored = replace(problem, strategy="none")
        assert volume(problem.comm, shape_of(plain, cp_size), rank=rank) == volume(
            problem.comm, shape_of(mirrored, cp_size), rank=rank
        )
        expected = volume(problem.comm, shape_of(problem, cp_size), rank=rank)
        assert joined(forward) == in_order(expected.forward), (problem.comm, rank)
        assert joined(backward) == in_order(expected.backward), (problem.comm, rank)
