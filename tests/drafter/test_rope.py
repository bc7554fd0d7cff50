"""Rotary embedding by explicit positions."""

import pytest
import torch

from megatron_splitkv.drafter.rope import apply_rotary, rotary_cos_sin
from megatron_splitkv.testing import relative_error

HEAD_DIM, THETA = 16, 1e6


def reference(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d / 2) turned as complex numbers, fp64."""
    half = HEAD_DIM // 2
    frequency = THETA ** (-torch.arange(half).double() / half)
    angle = positions.double()[:, None] * frequency
    phase = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * phase
    return torch.cat([turned.real, turned.imag], dim=-1)


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 1, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_equals_complex_rotation() -> None:
    positions = torch.tensor([0, 1, 5, 3, 700, 2])
    x = rows(len(positions))
    out = apply_rotary(x, rotary_cos_sin(positions, HEAD_DIM, THETA))
    assert relative_error(out, reference(x, positions)) < 1e-5
    assert torch.equal(out[0], x[0])


def test_gradient() -> None:
    cos_sin = rotary_cos_sin(torch.tensor([3, 0, 41]), HEAD_DIM, THETA).double()
    x = rows(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: apply_rotary(t, cos_sin), (x,))


def test_keeps_the_dtype_and_nothing_of_the_input() -> None:
    x = rows(4, torch.bfloat16).requires_grad_()
    cos_sin = rotary_cos_sin(torch.arange(4), HEAD_DIM, THETA)
    out = apply_rotary(x, cos_sin)
    assert out.dtype == torch.bfloat16
    saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [t.data_ptr() for t in saved] == [cos_sin.data_ptr()]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_a9_rows_in_any_order_equal_a_gather_of_the_ordered_ones() -> None:
    """Two documents of four tokens; a rank holds global chunks 3 and 0, in that order."""
    in_document = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    at = torch.tensor([6, 7, 0, 1])
    assert in_document[at].tolist() == [2, 3, 0, 1]
    keys = rows(8)
    whole = apply_rotary(keys, rotary_cos_sin(in_document, HEAD_DIM, THETA))
    local = apply_rotary(keys[at], rotary_cos_sin(in_document[at], HEAD_DIM, THETA))
    assert torch.equal(local, whole[at])


@pytest.mark.parametrize("position", [2**15, 2**20, 2**24 - 1])
def test_no_position_is_too_far(position: int) -> None:
    """There is no table to run past; an angle is off by no more than fp32 is at its size."""
    out = rotary_cos_sin(torch.tensor([position]), HEAD_DIM, THETA)
    angle = position * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    expected = torch.cat([angle.cos(), angle.sin()])
    torch.testing.assert_close(out[0].double(), expected, atol=position * 2.0**-22, rtol=0)
