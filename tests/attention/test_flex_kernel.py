"""The flex kernel: its block mask against the visible pairs, its algebra on a dense stand-in."""

import numpy as np
import pytest
import torch

from megatron_splitkv import compat
from megatron_splitkv.attention.kernels import flex
from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.plan import Staircase, build_plan, build_staircase
from megatron_splitkv.testing import relative_error
from tests.attention.partial_truth import (
    inputs,
    partial_truth,
    rectangles,
    staircase_of,
    visible_mask,
)
from tests.plan.layouts import layout_of

SCALE = 0.3
TILE = 128


def prefixes(num_blocks=30, num_keys=500, block_size=16, seed=0):
    """Two documents: blocks of growing prefixes, padding blocks, keys that nothing sees."""
    rng = np.random.default_rng(seed)
    half = num_keys // 2
    start = np.repeat([0, half], num_blocks)
    end = start + np.sort(rng.integers(0, half - 9, (2, num_blocks)), axis=1).ravel()
    start[3:5] = end[3:5] = 0
    return build_staircase(start, end, block_size), num_keys


def windows(num_rows=300, num_keys=700):
    """Rows that each see a range of their own, some of them none."""
    row = np.arange(num_rows)
    start = row * 2
    end = np.where(row % 7 == 0, start, np.minimum(start + 90, num_keys))
    return staircase_of([], rectangles(), start, end, 1), num_keys


CASES = {
    "prefixes": prefixes,
    "windows": windows,
    "whole tiles": lambda: (build_staircase(np.zeros(16, int), np.full(16, 384), 16), 384),
    "no keys": lambda: (build_staircase(np.zeros(3, int), np.zeros(3, int), 4), 0),
    "one row": lambda: (build_staircase(np.zeros(1, int), np.ones(1, int), 1), 1),
}


def from_tables(block_mask):
    """bool [Q, K']: the pairs that the operation computes, as it goes by the tables."""
    shape = block_mask.seq_lengths
    row = torch.arange(shape[0])[:, None]
    key = torch.arange(shape[1])[None]
    visible = torch.zeros(shape, dtype=torch.bool)
    tables = (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    )
    for counts, indices, full in tables:
        for i, count in enumerate(counts[0, 0].tolist()):
            for j in indices[0, 0, i, :count].tolist():
                rows, keys = slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE)
                assert not visible[rows, keys].any()  # no tile twice
                zero = torch.zeros(1, dtype=torch.int64)
                inside = block_mask.mask_mod(zero, zero, row[rows], key[:, keys])
                visible[rows, keys] = True if full else inside
    return visible


def dense_stand_in(q, k, v, block_mask, scale):
    """Differentiable; exactly the pairs of the tables, in fp32 and rounded once as on a GPU."""
    given, (q, k, v) = q.dtype, (x.to(accumulator_dtype(x.dtype)) for x in (q, k, v))
    hidden = ~from_tables(block_mask)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT).mul(scale).masked_fill(hidden, -torch.inf)
    blind = hidden.all(1)[:, None]
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1)
    # As the real one, it promises nothing for rows that see nothing.
    return ((scores - lse[..., None]).exp() @ v).to(given), lse


@pytest.fixture
def stand_in(monkeypatch):
    calls = []

    def counted(*args):
        calls.append([x.shape for x in args[:3]])
        return dense_stand_in(*args)

    monkeypatch.setattr(flex, "_KEY_MULTIPLE", 256)
    monkeypatch.setattr(flex, "_flex_attention", lambda: counted)
    return calls


def run(staircase, tensors, truth):
    q, k, v, grad_out = tensors
    out, lse = flex.forward(q, k, v, staircase, SCALE)
    whole = truth.whole_out.to(q.dtype), truth.whole_lse.to(lse.dtype)
    return out, lse, *flex.backward(grad_out, q, k, v, *whole, staircase, SCALE)


def errors(found, truth):
    out, lse, *grads = found
    assert torch.equal(lse == -torch.inf, truth.lse == -torch.inf)
    assert out[truth.lse == -torch.inf].count_nonzero() == 0
    expected = (truth.out, truth.lse.exp(), *truth[2:5])
    return [relative_error(a, b) for a, b in zip((out, lse.exp(), *grads), expected, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_tables_hold_the_visible_pairs(name):
    staircase, num_keys = CASES[name]()
    rounded = -(-num_keys // 512) * 512
    mask = flex._block_mask(staircase.row_start, staircase.row_end, rounded, torch.device("cpu"))
    visible = visible_mask(staircase, rounded)
    assert torch.equal(from_tables(mask), visible)
    # By tile: only tiles with a visible pair, and masked only where there is something to mask.
    rows = -(-staircase.num_rows // TILE) * TILE
    padded = torch.zeros(rows, rounded, dtype=torch.bool)
    padded[: staircase.num_rows] = visible
    by_tile = padded.view(rows // TILE, TILE, -1, TILE).transpose(1, 2).flatten(2)
    touched, full = by_tile.any(-1), by_tile.all(-1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), touched)
    assert mask.full_kv_num_blocks[0, 0].tolist() == full.sum(1).tolist()
    if name == "whole tiles":
        assert int(full.sum()) == 2 * 3
    # What the backward goes by is the same, by columns.
    for counts, tiles in (
        (mask.q_num_blocks, touched & ~full),
        (mask.full_q_num_blocks, full),
    ):
        assert counts[0, 0].tolist() == tiles.sum(0).tolist()


def test_tables_equal_those_of_a_dense_mask():
    """torch's own constructor, which evaluates every pair."""
    staircase, _ = prefixes()
    ours = flex._block_mask(staircase.row_start, staircase.row_end, 512, torch.device("cpu"))
    theirs = torch.nn.attention.flex_attention.create_block_mask(
        ours.mask_mod, None, None, staircase.num_rows, 512, device="cpu"
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_no_array_of_all_pairs():
    """2^11 rows x 2^24 keys are 2^35 pairs, more than int32 counts and memory holds."""
    rows, keys = 2**11, 2**24
    end = keys - np.arange(rows)
    touched, full = flex._tiles(np.zeros_like(end), end, keys)
    assert touched.shape == full.shape == (rows // TILE, keys // TILE)
    assert touched.sum() == sum(-(-keys_seen // TILE) for keys_seen in end[::TILE].tolist())
    assert full.sum() == sum(keys_seen // TILE for keys_seen in end[TILE - 1 :: TILE].tolist())


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", ["prefixes", "windows", "one row"])
def test_algebra(stand_in, name, heads):
    staircase, num_keys = CASES[name]()
    tensors = inputs(staircase.num_rows, num_keys, *heads)
    part = visible_mask(staircase, num_keys)
    truth = partial_truth(*tensors, part, part, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13


def test_backward_of_a_part_of_the_keys(stand_in):
    """The lse and the carrier of the whole: also of rows that see nothing in this part."""
    staircase, num_keys = prefixes()
    tensors = inputs(staircase.num_rows, num_keys, 4, 2)
    part = visible_mask(staircase, num_keys)
    rest = torch.zeros_like(part)
    rest[:, -5:] = True
    truth = partial_truth(*tensors, part, part | rest, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13


@pytest.mark.parametrize("name", ["prefixes", "windows"])
def test_what_takes_no_part_may_be_nan(stand_in, name):
    staircase, num_keys = CASES[name]()
    mask = visible_mask(staircase, num_keys)
    blind, unseen = ~mask.any(1), ~mask.any(0)
    assert blind.any()
    assert unseen.any()
    q, k, v, grad_out = inputs(staircase.num_rows, num_keys, 4, 2)
    truth = partial_truth(q, k, v, grad_out, mask, mask, SCALE)
    for x in (q, grad_out, truth.whole_out):
        x[blind] = torch.nan
    for x in (k, v):
        x[unseen] = torch.nan
    assert max(errors(run(staircase, (q, k, v, grad_out), truth), truth)) < 1e-13


def test_nothing_visible_calls_nothing(stand_in):
    for num_blocks, num_keys in ((0, 0), (0, 5), (3, 0), (3, 5)):
        none = np.zeros(num_blocks, dtype=np.int64)
        staircase = build_staircase(none, none, 4)
        tensors = inputs(num_blocks * 4, num_keys, 4, 2)
        mask = visible_mask(staircase, num_keys)
        found = run(staircase, tensors, partial_truth(*tensors, mask, mask, SCALE))
        assert [x.shape for x in found] == [
            tensors[0].shape,
            tensors[0].shape[:2],
            *(x.shape for x in tensors[:3]),
        ]
        assert bool((found[1] == -torch.inf).all())
        assert not any(x.count_nonzero() for x in (found[0], *found[2:]))
    assert stand_in == []


def test_lengths_near_each_other_share_a_shape(stand_in):
    shapes = set()
    for num_keys in (257, 300, 511, 512):
        staircase = build_staircase(np.zeros(2, int), np.array([40, 250]), 16)
        q, k, v, _ = inputs(32, num_keys, 4, 2)
        flex.forward(q, k, v, staircase, SCALE)
        shapes.add(tuple(stand_in.pop()))
    assert shapes == {((1, 4, 32, 8), (1, 2, 512, 8), (1, 2, 512, 8))}


def test_keys_are_copied_only_to_pad_or_to_clear_them():
    _, k, _, _ = inputs(1, 4096, 4, 2)
    device = torch.device("cpu")
    every = build_staircase(np.zeros(1, int), np.array([4096]), 1)
    assert flex._view_of(every, 4096, device).keys(k).data_ptr() == k.data_ptr()
    fewer = build_staircase(np.zeros(1, int), np.array([4000]), 1)
    assert flex._view_of(fewer, 4096, device).keys(k).data_ptr() != k.data_ptr()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
def test_torchs_own_operation_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward alone: the names, layouts and base of the log that the installed torch has."""
    monkeypatch.setattr(flex, "_flex_attention", flex._uncompiled)
    staircase, num_keys = prefixes()
    q, k, v, _ = inputs(staircase.num_rows, num_keys, 4, 2, dtype=torch.float32)
    out, lse = flex.forward(q, k, v, staircase, SCALE)
    mask = visible_mask(staircase, num_keys)
    truth = partial_truth(q, k, v, torch.zeros_like(q), mask, mask, SCALE)
    assert torch.equal(lse == -torch.inf, truth.lse == -torch.inf)
    assert out[truth.lse == -torch.inf].count_nonzero() == 0
    assert relative_error(out, truth.out) < 1e-6
    assert relative_error(lse.exp(), truth.lse.exp()) < 1e-5


def test_the_older_form_of_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module

    monkeypatch.delattr(module, "AuxRequest")
    monkeypatch.setattr(module, "flex_attention", lambda *args, return_lse: (args, return_lse))
    assert compat.flex_attention_with_lse()("q") == (("q",), True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_on_a_gpu(heads):
    rng = np.random.default_rng(0)
    documents = [(n, np.sort(rng.choice(n, 60, replace=False)).tolist(), 2) for n in (3000, 1100)]
    layout, length = layout_of(documents, block_size=16)
    plan = build_plan(layout, length, 2)
    staircase: Staircase = plan.staircase(0, flex.LEAF_LIMITS)
    num_keys = plan.num_rows(0)
    tensors = inputs(staircase.num_rows, num_keys, *heads, width=64, dtype=torch.bfloat16)
    tensors = [x.cuda() for x in tensors]
    mask = visible_mask(staircase, num_keys).cuda()
    truth = partial_truth(*tensors, mask, mask, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-2
