"""Shifts, turns and uneven gathers on 2 and 3 ranks: values, dtypes, and what the meter says."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    CommMeter,
    launch_broadcast,
    launch_gather_uneven,
    launch_reduce_sum,
    launch_shift,
)
from megatron_splitkv.testing import gloo_pool, subgroup

ROWS = {2: [3, 0], 3: [2, 0, 3]}  # of each rank


def _of_rank(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a larger tensor, not contiguous: 10 x rank + 0, 1, ..."""
    rows = ROWS[size][rank]
    return (torch.arange(4 * rows, dtype=dtype).view(rows, 4) / 2 + 10 * rank)[:, ::2]


def _hops(size: int, dtype: torch.dtype) -> dict[str, Any] | None:
    group, rank = subgroup(range(size)), dist.get_rank()
    if rank >= size:
        return None
    rows, x = ROWS[size], _of_rank(rank, size, dtype)
    kept = x.clone()
    with CommMeter() as meter:
        pending = launch_shift(x, group, label="first", received_rows=rows[rank - 1])
        other = launch_shift(x + 1, group, label="second", received_rows=rows[rank - 1])
        shifted = [pending.wait(), other.wait()]
        gathered = launch_gather_uneven(x, group, label="g", rows=rows).wait()
        turns, sums = [], []
        for turn in range(size):
            buffer = x if rank == turn else x.new_full((rows[turn], 2), torch.nan)
            turns.append(launch_broadcast(buffer, turn, group, label="b").wait())
            ones = torch.full((rows[turn], 2), rank + 1.0, dtype=dtype)
            sums.append(launch_reduce_sum(ones, turn, group, label="r").wait())
    assert torch.equal(x, kept), "inputs stay as they were"
    return {
        "shifted": shifted,
        "gathered": gathered,
        "turns": turns,
        "sum": sums[rank],
        "records": [(r.op, r.label, r.elements, r.dtype) for r in meter.records],
        "events": meter.events[:4],
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_volumes(size: int, dtype: torch.dtype) -> None:
    rows = ROWS[size]
    whole = [_of_rank(rank, size, dtype) for rank in range(size)]
    for rank, found in enumerate(gloo_pool(4).run(_hops, size, dtype)[:size]):
        before = whole[rank - 1]
        assert torch.equal(found["shifted"][0], before)
        assert torch.equal(found["shifted"][1], before + 1), "two messages keep their order"
        assert torch.equal(found["gathered"], torch.cat(whole))
        assert all(torch.equal(a, b) for a, b in zip(found["turns"], whole, strict=True))
        total = size * (size + 1) / 2
        assert torch.equal(found["sum"], torch.full((rows[rank], 2), total, dtype=dtype))
        sent, share = 2.0 * rows[rank], (size - 1) / size
        assert found["records"] == [
            ("shift", "first", sent, dtype),
            ("shift", "second", sent, dtype),
            ("all_gather_v", "g", (size - 1) * sent, dtype),
            *(
                (op, label, pytest.approx(2 * n * share), dtype)
                for n in rows
                for op, label in (("broadcast", "b"), ("reduce_sum", "r"))
            ),
        ]
        launched = [event for event in found["events"] if event[0] == "launch"]
        assert launched[:2] == [("launch", "first"), ("launch", "second")]


def _calls_of_a_fresh_group(gathers: bool) -> list[list[str]]:
    """What this rank asks of the backend for two exchanges in which rank 1 has nothing."""
    group = dist.new_group(range(3))
    rank = dist.get_rank()
    if rank >= 3:
        return []
    rows, found = [2, 0, 0], []
    x, real = torch.ones(rows[rank], 2), (dist.all_reduce, dist.batch_isend_irecv)
    for _ in range(2):
        called: list[str] = []

        def all_reduce(*args: Any, called: list[str] = called, **kwargs: Any) -> Any:
            called.append("all_reduce")
            return real[0](*args, **kwargs)

        def batch(ops: Any, called: list[str] = called) -> Any:
            called.append("messages")
            return real[1](ops)

        with (
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(dist, "batch_isend_irecv", batch),
            CommMeter() as meter,
        ):
            if gathers:
                launch_gather_uneven(x, group, label="x", rows=rows).wait()
            else:
                launch_shift(x, group, label="x", received_rows=rows[rank - 1]).wait()
        assert meter.calls() == 1, "what makes a group ready is no traffic of a layer"
        found.append(called)
    dist.destroy_process_group(group)
    return found


def test_all_ranks_meet_before_the_first_messages_of_a_group() -> None:
    """NCCL would wait for ever for a rank whose shards are empty."""
    shifts = gloo_pool(4).run(_calls_of_a_fresh_group, False)[:3]
    assert [first for first, _ in shifts] == [
        ["all_reduce", "messages"],
        ["all_reduce", "messages"],
        ["all_reduce"],  # rank 2 gets nothing of rank 1 and has nothing for rank 0
    ]
    assert [second for _, second in shifts] == [["messages"], ["messages"], []]
    gathers = gloo_pool(4).run(_calls_of_a_fresh_group, True)[:3]
    assert [first for first, _ in gathers] == [["all_reduce", "messages"]] * 3
    assert [second for _, second in gathers] == [["messages"]] * 3
