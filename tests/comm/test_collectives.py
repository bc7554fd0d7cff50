"""The collectives on 1 to 3 ranks: values, dtypes, order, and the bypass of a single rank."""

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    CommMeter,
    RowExchange,
    all_reduce_max,
    all_reduce_sum,
    group_rank,
    group_size,
    launch_all_to_all,
    launch_gather_rows,
)
from megatron_splitkv.testing import gloo_pool, subgroup

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_one_process_is_the_identity_and_calls_nothing() -> None:
    x = torch.randn(4, 2)
    exchange = RowExchange(None, 4)
    with CommMeter() as meter:
        assert launch_gather_rows(x, None, label="x").wait() is x
        assert launch_all_to_all(x, None, label="x").wait() is x
        assert all_reduce_max(x, None, label="x") is x
        assert all_reduce_sum(x, None, label="x") is x
        assert exchange.launch_cast(x, label="x").wait() is x
        assert exchange.sum(exchange.launch_return(x, label="x").wait(), x.dtype) is x
        assert exchange.total(x, label="x") is x
    assert (meter.calls(), meter.events) == (0, [])
    assert (group_rank(None), group_size(None)) == (0, 1)
    assert (exchange.alone, exchange.attended_rows, exchange.own_attended) == (True, 4, slice(0, 4))


def _every_collective(dtype: torch.dtype) -> dict[str, object] | None:
    group = subgroup(range(3))
    rank = dist.get_rank()
    if rank >= 3:
        return None
    # Rows of a larger tensor: not contiguous.
    x = torch.arange(8, dtype=dtype).view(2, 4)[:, ::2] + 10 * rank
    partial = torch.full((6, 2), rank + 1.0, dtype=dtype) * torch.arange(6, dtype=dtype)[:, None]
    extremes = torch.tensor([-torch.inf, rank, -rank], dtype=dtype)
    kept = extremes.clone()
    exchange = RowExchange(group, 2)
    sent = [1, 2, 3]  # rows to each rank, the same from all
    with CommMeter() as meter:
        result = {
            "gathered": launch_gather_rows(x, group, label="x").wait(),
            "summed": exchange.sum(exchange.launch_return(partial, label="y").wait(), dtype),
            "max": all_reduce_max(extremes, group, label="extremes"),
            "sum": all_reduce_sum(extremes, group, label="extremes"),
            "empty": launch_gather_rows(x[:0], group, label="empty").wait(),
            "uneven": launch_all_to_all(
                partial, group, label="z", sent_rows=sent, received_rows=[sent[rank]] * 3
            ).wait(),
        }
    assert torch.equal(extremes, kept), "inputs stay as they were"
    return {**result, "elements": [r.elements for r in meter.records]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_on_three_of_four_ranks(dtype: torch.dtype) -> None:
    *results, outsider = gloo_pool(4).run(_every_collective, dtype)
    assert outsider is None
    for rank, result in enumerate(results):
        rows = [[10.0 * r + a, 10.0 * r + a + 2] for r in range(3) for a in (0, 4)]
        assert result["gathered"].tolist() == rows
        # 1 + 2 + 3 times the row's number; this rank owns rows 2 * rank and 2 * rank + 1.
        assert result["summed"].tolist() == [[12.0 * rank] * 2, [12.0 * rank + 6] * 2]
        assert result["max"].tolist() == [-torch.inf, 2.0, 0.0]
        assert result["sum"].tolist() == [-torch.inf, 3.0, -3.0]
        assert result["empty"].shape == (0, 2)
        numbers = [[0], [1, 2], [3, 4, 5]][rank]
        assert result["uneven"][:, 0].tolist() == [r * n for r in (1, 2, 3) for n in numbers]
        assert all(result[name].dtype == dtype for name in ("gathered", "summed", "max", "sum"))
        to_others = 2.0 * (6 - (rank + 1))
        assert result["elements"] == [8.0, 8.0, 4.0, 4.0, 0.0, to_others]


def _sum_beyond_bf16() -> torch.Tensor | None:
    group = subgroup(range(3))
    if dist.get_rank() >= 3:
        return None
    share = [256.0, 1.0, 2.0][dist.get_rank()]
    exchange = RowExchange(group, 1)
    partial = torch.full((3, 1), share, dtype=torch.bfloat16)
    return exchange.sum(exchange.launch_return(partial, label="x").wait(), torch.float32)


def test_low_precision_contributions_add_up_in_fp32() -> None:
    # bf16 holds all three shares, and neither 257 nor 259.
    results = gloo_pool(4).run(_sum_beyond_bf16)
    assert [x.tolist() for x in results[:3]] == [[[259.0]]] * 3


def _events() -> list[tuple[str, str]] | None:
    group = subgroup(range(3))
    if dist.get_rank() >= 3:
        return None
    with CommMeter() as meter:
        first = launch_gather_rows(torch.zeros(1), group, label="first")
        second = launch_all_to_all(torch.zeros(3), group, label="second")
        second.wait()
        second.wait()
        first.wait()
        seen = list(meter.events)
        meter.clear()
        assert (meter.events, meter.records) == ([], [])
    return seen


def test_the_meter_sees_launches_and_waits_in_order() -> None:
    for events in gloo_pool(4).run(_events)[:3]:
        assert events == [
            ("launch", "first"),
            ("launch", "second"),
            ("wait", "second"),
            ("wait", "first"),
        ]
