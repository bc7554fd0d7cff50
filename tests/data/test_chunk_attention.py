"""Attention aligned at the end equals the whole attention's last rows."""

import pytest
import torch
import torch.nn.functional as F

from megatron_splitkv.data import chunk_attention
from megatron_splitkv.data.chunk_attention import end_aligned_attention


def _operands(
    new: int, seen: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query of all tokens, key, value, and what the last `new` queries get."""
    generator = torch.Generator().manual_seed(seen)
    query = torch.randn(1, 4, seen, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, seen, 16, generator=generator)
    scores = query @ key.repeat_interleave(2, dim=1).mT * 0.3
    future = torch.ones(seen, seen, dtype=torch.bool).triu(1)
    whole = scores.masked_fill(future, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    query, key, value = (tensor.to(device, dtype) for tensor in (query, key, value))
    return query[:, :, -new:], key, value, whole[:, :, -new:]


@pytest.mark.parametrize("entries", [1, 50, 1 << 22])
@pytest.mark.parametrize(("new", "seen"), [(5, 23), (1, 23), (22, 23), (23, 23)])
def test_the_last_query_sees_every_key(
    monkeypatch: pytest.MonkeyPatch, entries: int, new: int, seen: int
) -> None:
    monkeypatch.setattr(chunk_attention, "_MASK_ENTRIES", entries)
    query, key, value, expected = _operands(new, seen)
    got = end_aligned_attention(query, key, value, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    # PyTorch's own flag aligns at the start.
    wrong = F.scaled_dot_product_attention(
        query, key, value, scale=0.3, is_causal=True, enable_gqa=True
    )
    assert torch.allclose(wrong, expected, atol=1e-3) == (new == seen)


def test_no_mask_is_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "_MASK_ENTRIES", 50)
    sizes: list[int] = []

    def watch(*args: torch.Tensor, attn_mask: torch.Tensor, **rest: object) -> torch.Tensor:
        sizes.append(attn_mask.numel())
        return args[0]

    monkeypatch.setattr(chunk_attention.F, "scaled_dot_product_attention", watch)
    query, key, value, _ = _operands(5, 23)
    end_aligned_attention(query, key, value)
    assert sizes == [2 * 23, 2 * 23, 23]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_on_a_device(dtype: torch.dtype) -> None:
    query, key, value, expected = _operands(37, 301, dtype, "cuda")
    got = end_aligned_attention(query, key, value, 0.3).float().cpu()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert (got - expected).norm() <= tolerance * expected.norm()
