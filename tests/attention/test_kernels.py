"""Kernels on one process: the CPU kernel against its naive twin and against plain softmax."""

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import Kernel, cpu, cpu_tiles, naive
from megatron_splitkv.plan import LeafLimits, Rectangles, Staircase, build_staircase
from megatron_splitkv.testing import relative_error

B = 4
NOTHING = Rectangles(*(np.empty(0, dtype=np.int64) for _ in range(4)))


def _tensors(
    num_blocks: int, num_keys: int, num_heads: int = 4, num_key_heads: int = 2, width: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, width, dtype=torch.float64, generator=generator)

    q, grad_out = draw(num_blocks * B, num_heads), draw(num_blocks * B, num_heads)
    return q, draw(num_keys, num_key_heads), draw(num_keys, num_key_heads), grad_out


def _run(kernel: Kernel, staircase: Staircase, num_keys: int) -> list[torch.Tensor]:
    q, k, v, grad_out = _tensors(staircase.num_rows // B, num_keys)
    out, lse = kernel.forward(q, k, v, staircase, 0.3)
    grads = kernel.backward(grad_out, q, k, v, out, lse, staircase, 0.3)
    return [out, lse.exp(), *grads]  # exp: rows that see nothing compare as 0


def _assert_twins(staircase: Staircase, num_keys: int) -> None:
    fast, slow = _run(cpu, staircase, num_keys), _run(naive, staircase, num_keys)
    for a, b in zip(fast, slow, strict=True):
        assert relative_error(a, b) < 1e-13


def _documents(*ends: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Key ranges of blocks of documents of `length` local keys each."""
    start = np.concatenate([np.full(len(row), i * length) for i, row in enumerate(ends)])
    return start.astype(np.int64), (start + np.concatenate(ends)).astype(np.int64)


@pytest.mark.parametrize("view_pairs", [1, 2000, 10**9])
@pytest.mark.parametrize("batch_pairs", [1, 5000, 10**9])
@pytest.mark.parametrize("limits", [LeafLimits(0, 0, 0), LeafLimits(12, 10, 60), LeafLimits()])
def test_cpu_kernel_equals_its_twin_however_tiled(
    monkeypatch: pytest.MonkeyPatch, view_pairs: int, batch_pairs: int, limits: LeafLimits
) -> None:
    monkeypatch.setattr(cpu_tiles, "VIEW_PAIRS", view_pairs)
    monkeypatch.setattr(cpu_tiles, "_BATCH_PAIRS", batch_pairs)
    start, end = _documents(
        tuple(range(0, 60, 2)), (0, 0, 5, 5, 5, 59), (1,), tuple(range(30, 60)), length=60
    )
    _assert_twins(build_staircase(start, end, B, limits), 240)


def test_short_documents_are_a_few_calls() -> None:
    """24 of 128 keys with 8 blocks, as in a quick start, and a long one beside them."""
    rng = np.random.default_rng(0)
    ends = [np.sort(rng.choice(np.arange(1, 128), 8, replace=False)) for _ in range(24)]
    start = np.repeat(np.arange(24) * 128, 8)
    long = np.arange(200, 4000, 100)
    key_start = np.concatenate([start, np.full(long.size, 24 * 128)])
    key_end = np.concatenate([start + np.concatenate(ends), 24 * 128 + long])
    alone = build_staircase(key_start[:192], key_end[:192], B, cpu.LEAF_LIMITS)
    assert (len(alone.levels), len(alone.leaves)) == (0, 24)
    assert len(cpu_tiles.tiles_of(alone)) <= 4
    both = build_staircase(key_start, key_end, B, cpu.LEAF_LIMITS)
    assert both.levels[0].q_start.tolist() == [192]  # the long one has its leading rectangle
    _assert_twins(both, 24 * 128 + 4000)


def test_a_short_document_whose_blocks_see_the_same_needs_no_mask() -> None:
    start, end = _documents((5, 5, 5), length=9)
    staircase = build_staircase(start, end, B, cpu.LEAF_LIMITS)
    assert (len(staircase.levels), len(staircase.leaves)) == (1, 0)
    assert staircase.executed_pairs == staircase.needed_pairs


def test_twin_equals_plain_softmax() -> None:
    start, end = _documents((2, 5), length=7)
    staircase = build_staircase(start, end, B)
    q, k, v, grad_out = _tensors(2, 7, num_heads=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("qhd,khd->hqk", leaves[0], leaves[1]) * 0.3
    hidden = torch.arange(7) >= torch.tensor([2, 5]).repeat_interleave(B)[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), leaves[2])
    expected.backward(grad_out)
    out, lse = naive.forward(q, k, v, staircase, 0.3)
    grads = naive.backward(grad_out, q, k, v, out, lse, staircase, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T)
    for grad, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize(("num_blocks", "num_keys"), [(0, 0), (0, 5), (3, 0), (3, 5)])
def test_nothing_to_see_is_zero_and_minus_infinity(
    kernel: Kernel, num_blocks: int, num_keys: int
) -> None:
    none = np.zeros(num_blocks, dtype=np.int64)
    staircase = build_staircase(none, none, B)
    q, k, v, grad_out = _tensors(num_blocks, num_keys)
    out, lse = kernel.forward(q, k, v, staircase, 0.3)
    assert out.shape == q.shape
    assert out.count_nonzero() == 0
    assert bool((lse == -torch.inf).all())
    for grad, x in zip(
        kernel.backward(grad_out, q, k, v, out, lse, staircase, 0.3), (q, k, v), strict=True
    ):
        assert grad.shape == x.shape
        assert grad.count_nonzero() == 0


def test_rows_of_a_leaf_that_see_nothing_have_no_weight() -> None:
    # torch's operation reports lse 0 for such rows; seeing 0 keys and weighing exp(0) is the fault.
    one = np.array([0], dtype=np.int64)
    staircase = Staircase(
        levels=[],
        leaves=Rectangles(one, one + 2, one, one + 6),
        row_start=np.zeros(2 * B, dtype=np.int64),
        row_end=np.repeat([0, 6], B),
        block_size=B,
        needed_pairs=6 * B,
        executed_pairs=12 * B,
    )
    q, k, v, _ = _tensors(2, 6)
    out, lse = cpu.forward(q, k, v, staircase, 0.3)
    assert bool((lse[:B] == -torch.inf).all())
    assert out[:B].count_nonzero() == 0
    assert bool(torch.isfinite(lse[B:]).all())
    _assert_twins(staircase, 6)


def test_empty_rectangles_do_not_end_the_process() -> None:
    at = np.array([0], dtype=np.int64)
    empty_keys = Rectangles(at, at + 1, at + 2, at + 2)
    empty_blocks = Rectangles(at, at, at, at + 2)
    zero = np.zeros(B, dtype=np.int64)
    staircase = Staircase([empty_keys, empty_blocks], NOTHING, zero, zero, B, 0, 0)
    _assert_twins(staircase, 6)


@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
def test_rows_that_nothing_sees_may_hold_nan(kernel: Kernel) -> None:
    # Two leaves of one batch, the second a little smaller: what its padding reads must be its own.
    start = np.repeat([0, 63], [15, 15])
    end = start + np.concatenate([np.arange(49, 64), np.arange(47, 62)])
    start[-1] = end[-1] = 0  # a padding block behind the second document's 14
    leaves = Rectangles(*np.array([[0, 15], [15, 29], [0, 63], [63, 124]]))
    staircase = Staircase([], leaves, start.repeat(B), end.repeat(B), B, 0, 0)
    assert len(list(cpu_tiles._lay_out(leaves, staircase, masked=True))) == 1
    results = []
    for fill in (0.0, torch.nan):
        q, k, v, grad_out = _tensors(30, 63 + 61 + 5)
        for x in (q, grad_out):
            x[-B:] = fill
        for x in (k, v):
            x[-5:] = fill
        out, lse = kernel.forward(q, k, v, staircase, 0.3)
        results.append([out, lse, *kernel.backward(grad_out, q, k, v, out, lse, staircase, 0.3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kernel", [naive, cpu], ids=["naive", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_give_fp32_partials(kernel: Kernel, dtype: torch.dtype) -> None:
    start, end = _documents(tuple(range(1, 40)), length=40)
    staircase = build_staircase(start, end, B)
    q, k, v, grad_out = (x.to(dtype) for x in _tensors(39, 40, num_heads=8, num_key_heads=1))
    exact = [x.double() for x in (q, k, v, grad_out)]
    out, lse = kernel.forward(q, k, v, staircase, 0.3)
    true_out, true_lse = naive.forward(*exact[:3], staircase, 0.3)
    grads = kernel.backward(grad_out, q, k, v, out.to(dtype), lse, staircase, 0.3)
    true = naive.backward(
        exact[3], *exact[:3], out.to(dtype).double(), lse.double(), staircase, 0.3
    )
    assert [x.dtype for x in (out, lse, *grads)] == [torch.float32] * 3 + [dtype] * 2
    # Partials are exact for the rounded inputs; only dk and dv are rounded, once.
    for found, expected in ((out, true_out), (lse, true_lse), (grads[0], true[0])):
        assert relative_error(found, expected) < 1e-6
    for found, expected in zip(grads[1:], true[1:], strict=True):
        assert relative_error(found, expected) < max(1e-6, torch.finfo(dtype).eps / 2)


def test_grouped_heads_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = _documents(tuple(range(1, 40)), length=40)
    staircase = build_staircase(start, end, B)
    q, k, v, _ = _tensors(39, 40, num_heads=8, num_key_heads=2)
    heads = []
    right = cpu._flash_forward

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        return right(q, k, v, **options)

    monkeypatch.setattr(cpu, "_flash_forward", spy)
    cpu.forward(q, k, v, staircase, 0.3)
    assert set(heads) == {(8, 2, 2)}
