"""Masked leaves as batched products, against fp64 truth."""

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import leaves as leaves_module
from megatron_splitkv.attention.kernels.leaves import backward_leaves, forward_leaves
from megatron_splitkv.attention.merge import accumulator_dtype, merge_
from megatron_splitkv.plan import LeafLimits, build_staircase
from megatron_splitkv.testing import relative_error
from tests.attention.partial_truth import (
    inputs,
    leaf_mask,
    partial_truth,
    rectangles,
    staircase_of,
    visible_mask,
)

B = 4
SCALE = 0.3
HEADS = [(4, 4), (4, 2), (4, 1)]
EVERYTHING = LeafLimits(10**9, 10**9, 10**9)


def ragged(limits, num_documents=4, blocks=9, keys=50, seed=0):
    """Documents whose blocks see random prefixes, padding blocks amid them."""
    rng = np.random.default_rng(seed)
    start = np.repeat(np.arange(num_documents) * keys, blocks)
    end = start + np.sort(rng.integers(0, keys, (num_documents, blocks)), axis=1).ravel()
    padding = rng.random(start.size) < 0.1
    return build_staircase(
        np.where(padding, 0, start), np.where(padding, 0, end), B, limits
    ), num_documents * keys


def window_like():
    """Leaves of one shape that share query rows and keys, with rows that see nothing of one."""
    row_start, row_end = [], []
    for row in range(6 * B):
        row_start.append(row)
        row_end.append(row + 10 if row % 5 else row)
    leaves = rectangles((0, 3, 0, 14), (1, 4, 14, 28), (3, 6, 4, 14), (4, 6, 14, 35))
    return staircase_of([], leaves, row_start, row_end, B), 37


def run(staircase, num_keys, tensors, truth, before=None):
    """Leaves merged into what is known of the other pairs, and their gradients added to ones."""
    q, k, v, grad_out = tensors
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
    if before is not None:
        merge_(out, lse, before.out.to(dtype), before.lse.to(dtype))
    forward_leaves(q, k, v, staircase, SCALE, out, lse)
    grads = [x.new_ones(x.shape, dtype=dtype) for x in (q, k, v)]
    backward_leaves(
        grad_out,
        q,
        k,
        v,
        truth.whole_out.to(q.dtype),
        truth.whole_lse.to(dtype),
        staircase,
        SCALE,
        *grads,
    )
    return out, lse, *(grad - 1 for grad in grads)


def assert_close(found, truth, bound, *, whole):
    out, lse, *grads = found
    expected_out, expected_lse = (
        (truth.whole_out, truth.whole_lse) if whole else (truth.out, truth.lse)
    )
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert out[expected_lse == -torch.inf].count_nonzero() == 0
    expected = [expected_out, expected_lse.exp(), truth.grad_q, truth.grad_k, truth.grad_v]
    for a, b in zip((out, lse.exp(), *grads), expected, strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.parametrize("score_bytes", [1, 20_000, 2**30])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("limits", [LeafLimits(3 * B, 20, 60), LeafLimits(), EVERYTHING])
def test_leaves_however_batched(monkeypatch, limits, heads, score_bytes):
    monkeypatch.setattr(leaves_module, "_SCORE_BYTES", score_bytes)
    staircase, num_keys = ragged(limits)
    assert len(staircase.leaves) > 1
    tensors = inputs(staircase.num_rows, num_keys, *heads)
    mask = leaf_mask(staircase, num_keys)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    assert_close(run(staircase, num_keys, tensors, truth), truth, 1e-13, whole=False)


def test_merged_into_the_levels_and_with_the_lse_of_all():
    staircase, num_keys = ragged(LeafLimits(2 * B, 30, 0))
    tensors = inputs(staircase.num_rows, num_keys, 4, 2)
    leaf, whole = leaf_mask(staircase, num_keys), visible_mask(staircase, num_keys)
    assert leaf.sum() < whole.sum()
    truth = partial_truth(*tensors, leaf, whole, SCALE)
    others = partial_truth(*tensors, whole & ~leaf, whole, SCALE)
    assert_close(run(staircase, num_keys, tensors, truth, others), truth, 1e-13, whole=True)


@pytest.mark.parametrize("heads", HEADS)
def test_leaves_that_share_rows_and_keys(heads):
    staircase, num_keys = window_like()
    tensors = inputs(staircase.num_rows, num_keys, *heads)
    mask = leaf_mask(staircase, num_keys)
    truth = partial_truth(*tensors, mask, visible_mask(staircase, num_keys), SCALE)
    assert_close(run(staircase, num_keys, tensors, truth), truth, 1e-13, whole=False)


def test_what_takes_no_part_may_be_nan():
    """Blind rows inside a leaf, keys inside and beside leaves that no row sees."""
    staircase, num_keys = window_like()
    whole = visible_mask(staircase, num_keys)
    # A leaf's keys 10 and 11 that its rows skip.
    row_start = np.array([0, 0, 0, 0, 12, 12, 12, 12])
    row_end = np.array([10, 10, 10, 10, 16, 16, 12, 16])
    gap = staircase_of([], rectangles((0, 2, 0, 16)), row_start, row_end, B)
    for case, keys in ((staircase, num_keys), (gap, 18)):
        whole = visible_mask(case, keys)
        blind, unseen = ~whole.any(1), ~whole.any(0)
        assert blind.any()
        assert unseen.any()
        q, k, v, grad_out = inputs(case.num_rows, keys, 4, 2)
        truth = partial_truth(q, k, v, grad_out, leaf_mask(case, keys), whole, SCALE)
        for x in (q, grad_out, truth.whole_out):
            x[blind] = torch.nan
        for x in (k, v):
            x[unseen] = torch.nan
        found = run(case, keys, (q, k, v, grad_out), truth)
        assert_close(found, truth, 1e-13, whole=False)


def test_low_precision_products_add_up_in_fp32():
    staircase, num_keys = ragged(EVERYTHING, keys=200)
    mask = leaf_mask(staircase, num_keys)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 6e-4)):
        tensors = inputs(staircase.num_rows, num_keys, 4, 1, dtype=dtype)
        truth = partial_truth(*tensors, mask, mask, SCALE)
        found = run(staircase, num_keys, tensors, truth)
        assert all(x.dtype == torch.float32 for x in found)
        assert_close(found, truth, bound, whole=False)


def test_large_logits_lose_nothing_in_the_scores():
    """Scores rounded to bf16 would be off by up to 0.5 at 130: a wrong softmax altogether."""
    staircase, num_keys = ragged(EVERYTHING)
    q, k, v, grad_out = inputs(staircase.num_rows, num_keys, 2, 1, dtype=torch.bfloat16)
    q = q * 64
    mask = leaf_mask(staircase, num_keys)
    truth = partial_truth(q, k, v, grad_out, mask, mask, SCALE)
    assert truth.whole_lse.max() > 130
    found = run(staircase, num_keys, (q, k, v, grad_out), truth)
    assert relative_error(found[0], truth.out) < 5e-3
    for a, b in zip(found[2:], truth[2:5], strict=True):
        assert relative_error(a, b) < 2e-2


def test_grouped_heads_are_not_repeated_and_batches_are_bounded(monkeypatch):
    monkeypatch.setattr(leaves_module, "_SCORE_BYTES", 40_000)
    staircase, num_keys = ragged(LeafLimits(4 * B, 50, 0), num_documents=20)
    q, k, v, _ = inputs(staircase.num_rows, num_keys, 8, 2)
    made = []
    right = leaves_module._product

    def spy(a, b):
        made.append((a.shape, b.shape))
        return right(a, b)

    monkeypatch.setattr(leaves_module, "_product", spy)
    forward_leaves(q, k, v, staircase, SCALE, q.clone(), q.new_zeros(q.shape[:2]))
    assert len(made) > 4
    assert sum(b[0] * b[2] for _, b in made[::2]) < 2 * 2 * 20 * 50  # a padded key per key head
    for a, b in made[::2]:
        assert 4 * a[0] * a[1] * b[2] <= 40_000


def test_laid_out_once():
    staircase, num_keys = ragged(LeafLimits())
    q, k, v, _ = inputs(staircase.num_rows, num_keys, 4, 2)
    layouts = []
    for _ in range(2):
        forward_leaves(q, k, v, staircase, SCALE, q.clone(), q.new_zeros(q.shape[:2]))
        layouts.append(leaves_module._batches_of(staircase, q.device, 4))
    assert layouts[0] is layouts[1]


def test_offsets_of_rows_beyond_int32():
    """Block 2^28 of 16 rows begins at row 2^32, and its keys at row 2^33."""
    rows = rectangles((2**28, 2**28 + 1, 2**33, 2**33 + 3))
    batch = leaves_module.PackedRows.of(rows.q_start * 16, (rows.q_end - rows.q_start) * 16)
    assert batch.index.dtype == torch.int64
    assert batch.index.tolist() == list(range(2**32, 2**32 + 16))
    keys = leaves_module.PackedRows.of(rows.k_start, rows.k_end - rows.k_start)
    assert keys.index.tolist() == [2**33, 2**33 + 1, 2**33 + 2]
    # Sizes whose product is beyond int32: one leaf a batch, not a negative number of them.
    many = rectangles(*((i, i + 1, 0, 2**20) for i in range(3)))
    groups = list(leaves_module._groups(many, 2**12, 32))
    assert [group.tolist() for group in groups] == [[0], [1], [2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    staircase, num_keys = ragged(LeafLimits(3 * B, 20, 60))
    mask = leaf_mask(staircase, num_keys)
    tensors = inputs(staircase.num_rows, num_keys, 4, 2, width=64, dtype=torch.bfloat16)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    on_gpu = truth._replace(whole_out=truth.whole_out.cuda(), whole_lse=truth.whole_lse.cuda())
    found = run(staircase, num_keys, [x.cuda() for x in tensors], on_gpu)
    assert_close([x.cpu() for x in found], truth, 1e-2, whole=False)
