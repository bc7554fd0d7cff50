"""The algebra of partial attention at its edges: nothing seen, huge scores, tiny gradients."""

import math

import pytest
import torch

from megatron_splitkv.attention.merge import (
    accumulator_dtype,
    delta_carrier,
    merge_,
    row_delta,
    softmax_weight,
)

INF = math.inf

# Rows of case A6: log-sum-exps of two shards, and of both.
PAIRS = [(0.0, 100.0), (-100.0, 100.0), (1000.0, 1000.0), (-INF, 5.0), (-INF, -INF)]
WHOLE = [100.0, 100.0, 1000.6931, 5.0, -INF]


@pytest.mark.parametrize("swapped", [False, True])
def test_a6_merge_neither_overflows_nor_depends_on_order(swapped: bool) -> None:
    first, second = (torch.tensor([p])[0] for p in zip(*PAIRS, strict=True))
    lse, other_lse = (second, first) if swapped else (first, second)
    out = torch.where(lse > -INF, 1.0, 0.0)[:, None, None].repeat(1, 1, 2)
    other_out = torch.where(other_lse > -INF, 1.0, 0.0)[:, None, None].repeat(1, 1, 2)
    lse = lse[:, None].clone()
    merge_(out, lse, other_out, other_lse[:, None])
    torch.testing.assert_close(lse[:, 0], torch.tensor(WHOLE), rtol=1e-7, atol=0.0)
    # Both shards averaged ones: so does the whole, and a row that saw nothing stays 0.
    # (An fp32 log-sum-exp of 1000 is itself known to 3e-5 only.)
    expected_out = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(out[:, 0, 0], expected_out, rtol=5e-5, atol=0.0)


def test_merge_equals_one_softmax_in_any_split() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(3, 2, 9, dtype=torch.float64) * 20, torch.randn(9, 4).double()

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        return part.softmax(-1) @ values[keys], part.logsumexp(-1)

    out, lse = attend(slice(0, 1))
    for keys in (slice(1, 6), slice(6, 9)):
        merge_(out, lse, *attend(keys))
    whole_out, whole_lse = attend(slice(0, 9))
    torch.testing.assert_close(out, whole_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


def test_merge_writes_through_views() -> None:
    out, lse = torch.zeros(4, 1, 2), torch.full((4, 1), -INF)
    merge_(out[1:3], lse[1:3], torch.ones(2, 1, 2), torch.zeros(2, 1))
    assert out[:, 0, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert lse[:, 0].tolist() == [-INF, 0.0, 0.0, -INF]


def test_weights_of_the_pairs_sum_to_one_or_nothing() -> None:
    pairs, whole = torch.tensor(PAIRS), torch.tensor(WHOLE)[:, None]
    weights = softmax_weight(pairs, whole)
    torch.testing.assert_close(
        weights.sum(1), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), rtol=1e-4, atol=0.0
    )
    assert weights[3].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_carrier_carries_delta_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    grad_out = (torch.randn(64, 2, 16, dtype=torch.float64) * scale).to(dtype)
    out = torch.randn(64, 2, 16, dtype=torch.float64).to(dtype)
    delta = row_delta(grad_out, out)
    assert delta.dtype == accumulator_dtype(dtype)
    carrier = delta_carrier(grad_out, delta)
    assert carrier.dtype == dtype
    eps = torch.finfo(dtype).eps
    carried = (grad_out.double() * carrier.double()).sum(-1)
    torch.testing.assert_close(carried, delta.double(), rtol=16 * eps, atol=0.0)
    assert bool((carrier.double().norm(dim=-1) <= out.double().norm(dim=-1) * (1 + 16 * eps)).all())


def test_carrier_of_no_gradient_is_zero() -> None:
    grad_out = torch.zeros(3, 2, 4)
    grad_out[1, 0, 2] = 2.0  # a single entry
    carrier = delta_carrier(grad_out, torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 0.0]]))
    assert carrier[1, 0].tolist() == [0.0, 0.0, 1.5, 0.0]
    assert carrier.count_nonzero() == 1
    assert bool(torch.isfinite(carrier).all())
