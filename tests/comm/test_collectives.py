"""The collectives on 1 to 3 ranks: values, dtypes, order, and the bypass of a single rank."""

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    CommMeter,
    all_reduce_max,
    all_reduce_sum,
    gather_rows,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from megatron_splitkv.testing import gloo_pool, subgroup

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_one_process_is_the_identity_and_calls_nothing() -> None:
    x = torch.randn(4, 2)
    with CommMeter() as meter:
        assert gather_rows(x, None, label="x") is x
        assert reduce_scatter_rows(x, None, wire_dtype=torch.bfloat16, label="x") is x
        assert all_reduce_max(x, None, label="x") is x
        assert all_reduce_sum(x, None, label="x") is x
    assert meter.calls() == 0
    assert (group_rank(None), group_size(None)) == (0, 1)


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
    with CommMeter() as meter:
        result = {
            "gathered": gather_rows(x, group, label="x"),
            "scattered": reduce_scatter_rows(partial, group, wire_dtype=dtype, label="partial"),
            "max": all_reduce_max(extremes, group, label="extremes"),
            "sum": all_reduce_sum(extremes, group, label="extremes"),
            "empty": gather_rows(x[:0], group, label="empty"),
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
        assert result["scattered"].tolist() == [[12.0 * rank] * 2, [12.0 * rank + 6] * 2]
        assert result["max"].tolist() == [-torch.inf, 2.0, 0.0]
        assert result["sum"].tolist() == [-torch.inf, 3.0, -3.0]
        assert result["empty"].shape == (0, 2)
        assert all(result[name].dtype == dtype for name in ("gathered", "scattered", "max", "sum"))
        assert result["elements"] == [8.0, 8.0, 4.0, 4.0, 0.0]


def _sum_beyond_bf16() -> torch.Tensor | None:
    group = subgroup(range(3))
    if dist.get_rank() >= 3:
        return None
    share = [256.0, 1.0, 2.0][dist.get_rank()]
    partial = torch.full((3, 1), share)
    return reduce_scatter_rows(partial, group, wire_dtype=torch.bfloat16, label="x")


def test_low_precision_partials_add_up_in_fp32() -> None:
    # bf16 holds all three shares, and neither 257 nor 259.
    results = gloo_pool(4).run(_sum_beyond_bf16)
    assert [x.tolist() for x in results[:3]] == [[[259.0]]] * 3
