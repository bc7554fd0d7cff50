"""The whole flash kernel on an emulator of torch's two operations, against fp64 truth."""

import inspect
import math

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import flash
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import LeafLimits, build_plan, build_staircase
from megatron_splitkv.testing import relative_error
from tests.attention.flash_emulator import ContractError, FlashEmulator
from tests.attention.partial_truth import (
    inputs,
    partial_truth,
    rectangles,
    staircase_of,
    visible_mask,
)
from tests.plan.layouts import layout_of, random_plan

HEADS = [(4, 4), (4, 2), (4, 1)]
SCALE = 0.3
LIMITS = [
    LeafLimits(0, 0, 0),
    LeafLimits(8, 20, 60),
    LeafLimits(8, 20, 60, tile=4),
    flash.LEAF_LIMITS,
]
# Every limit with grouped heads, every kind of heads with one limit.
CASES = [(limits, (4, 2)) for limits in LIMITS] + [(LIMITS[2], (4, 4)), (LIMITS[2], (4, 1))]


@pytest.fixture
def emulator(monkeypatch):
    return FlashEmulator().install(monkeypatch, flash)


def run(staircase, tensors, truth):
    """Out, lse and the three gradients, with what the whole attention sees as lse and carrier."""
    q, k, v, grad_out = tensors
    out, lse = flash.forward(q, k, v, staircase, SCALE)
    grads = flash.backward(
        grad_out,
        q,
        k,
        v,
        truth.whole_out.to(q.dtype),
        truth.whole_lse.to(lse.dtype),
        staircase,
        SCALE,
    )
    return out, lse, *grads


def errors(found, truth):
    out, lse, *grads = found
    assert torch.equal(lse == -torch.inf, truth.lse == -torch.inf)
    assert out[truth.lse == -torch.inf].count_nonzero() == 0
    expected = (truth.out, truth.lse.exp(), *truth[2:5])
    return [relative_error(a, b) for a, b in zip((out, lse.exp(), *grads), expected, strict=True)]


def ragged(limits, num_blocks=40, num_keys=90, block_size=4, seed=0):
    """Two documents with many levels, padding blocks amid the first and a gap between the two."""
    rng = np.random.default_rng(seed)
    start = np.repeat([0, num_keys], num_blocks)
    end = start + np.sort(rng.integers(0, num_keys - 5, (2, num_blocks)), axis=1).ravel()
    start[num_blocks // 2 : num_blocks // 2 + 3] = end[num_blocks // 2 : num_blocks // 2 + 3] = 0
    return build_staircase(start, end, block_size, limits), 2 * num_keys


@pytest.mark.parametrize(("limits", "heads"), CASES)
def test_every_rank_of_random_plans(emulator, limits, heads):
    """Unequal and empty shards, odd P, padding blocks, documents without anchors."""
    empty = 0
    for seed in range(4):
        cp_size = 1 + seed
        plan = random_plan(seed, cp_size)
        for rank in range(cp_size):
            staircase = plan.staircase(rank, limits)
            num_keys = plan.num_rows(rank)
            empty += num_keys == 0
            tensors = inputs(staircase.num_rows, num_keys, *heads, seed=seed)
            mask = visible_mask(staircase, num_keys)
            truth = partial_truth(*tensors, mask, mask, SCALE)
            assert max(errors(run(staircase, tensors, truth), truth), default=0) < 1e-13
    assert empty
    assert emulator.forward_calls == emulator.backward_calls
    assert emulator.forward_calls or limits == flash.LEAF_LIMITS  # small: leaves alone


@pytest.mark.parametrize(("limits", "heads"), CASES)
def test_many_levels_and_the_lse_of_all_ranks(emulator, limits, heads):
    """A part of the keys: the backward must use the lse and the carrier that it is given."""
    staircase, num_keys = ragged(limits)
    tensors = inputs(staircase.num_rows, num_keys, *heads)
    part = visible_mask(staircase, num_keys)
    rest = torch.zeros_like(part)
    rest[:, num_keys - 4 :] = True  # keys that no row sees here, as if they were elsewhere
    truth = partial_truth(*tensors, part, part | rest, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13
    assert emulator.pairs == sum(level.num_cells for level in staircase.levels) * 4
    assert emulator.forward_calls == len(staircase.levels) > 4 or limits == flash.LEAF_LIMITS


@pytest.mark.parametrize("limits", [LIMITS[0], LIMITS[1], flash.LEAF_LIMITS])
def test_sliding_windows(emulator, limits):
    """Rows of a block see different ranges, leaves share rows; the rank's own blocks, too."""
    for seed in (1, 2):
        plan = random_plan(seed, 2)
        staircases = [plan.staircase(rank, limits, window=9) for rank in range(2)]
        keys = [plan.num_rows(rank) for rank in range(2)]
        own = plan.own_staircase(1, 5)
        for staircase, num_keys in zip([*staircases, own], [*keys, own.num_rows], strict=True):
            tensors = inputs(staircase.num_rows, num_keys, 4, 2, seed=seed)
            mask = visible_mask(staircase, num_keys)
            truth = partial_truth(*tensors, mask, mask, SCALE)
            assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13
    assert emulator.forward_calls or limits == flash.LEAF_LIMITS


@pytest.mark.parametrize("heads", HEADS)
def test_fp32(emulator, heads):
    staircase, num_keys = ragged(LIMITS[1])
    tensors = inputs(staircase.num_rows, num_keys, *heads, dtype=torch.float32)
    mask = visible_mask(staircase, num_keys)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    found = run(staircase, tensors, truth)
    assert {x.dtype for x in found} == {torch.float32}
    assert max(errors(found, truth)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("limits", "heads"), CASES)
def test_low_precision_is_as_good_as_one_dense_attention(emulator, limits, heads, dtype):
    staircase, num_keys = ragged(limits)
    tensors = inputs(staircase.num_rows, num_keys, *heads, dtype=dtype)
    mask = visible_mask(staircase, num_keys)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    found = run(staircase, tensors, truth)
    assert [x.dtype for x in found] == [torch.float32] * 3 + [dtype] * 2
    reference = dense_attention(*tensors, mask)
    found_errors = errors(found, truth)
    assert found_errors[1] < 1e-5  # the lse is fp32
    reference_errors = [
        relative_error(a, b) for a, b in zip(reference, (truth.out, *truth[2:5]), strict=True)
    ]
    for error, bound in zip([found_errors[0], *found_errors[2:]], reference_errors, strict=True):
        assert error < 2 * bound


def dense_attention(q, k, v, grad_out, mask):
    """torch's attention with a dense mask in the dtype of its inputs: out and gradients."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sees = mask.any(1)
    out = (
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in leaves),
            attn_mask=mask | ~sees[:, None],
            scale=SCALE,
            enable_gqa=True,
        )[0].transpose(0, 1)
        * sees[:, None, None]
    )
    return out, *torch.autograd.grad(out, leaves, grad_out)


def test_what_takes_no_part_may_be_nan(emulator):
    staircase, num_keys = ragged(LIMITS[1])
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


def test_strided_inputs_and_gradients(emulator):
    staircase, num_keys = ragged(LIMITS[1])
    q, k, v, grad_out = inputs(staircase.num_rows, num_keys, 4, 2)
    mask = visible_mask(staircase, num_keys)
    truth = partial_truth(q, k, v, grad_out, mask, mask, SCALE)
    for strided in (
        lambda x: torch.stack([x, x], dim=-1)[..., 0],  # gaps along the width
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # heads outermost
    ):
        tensors = [strided(x) for x in (q, k, v, grad_out)]
        assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13


def test_one_range_is_read_in_place(emulator):
    """The first level of one document: all its blocks, and the keys that they share."""
    staircase = build_staircase(np.zeros(6, int), np.arange(20, 26), 4, LeafLimits(0, 0, 0))
    q, k, v, _ = inputs(24, 26, 4, 2)
    flash.forward(q, k, v, staircase, SCALE)
    assert emulator.rows_given[:2] == [(q.data_ptr(), 24), (k.data_ptr(), 20)]


def test_single_query_rows_do_not_take_the_path_for_decoding(emulator):
    staircase = build_staircase(np.zeros(3, int), np.array([2, 4, 9]), 1, LeafLimits(0, 0, 0))
    tensors = inputs(3, 9, 4, 1)
    mask = visible_mask(staircase, 9)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13


def test_rectangles_without_pairs_are_left_out(emulator):
    levels = [rectangles((0, 1, 2, 2), (1, 2, 2, 6)), rectangles((0, 0, 0, 2))]
    staircase = staircase_of(levels, rectangles(), [2] * 8, [2] * 4 + [6] * 4, 4)
    tensors = inputs(8, 6, 4, 2)
    mask = visible_mask(staircase, 6)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    assert max(errors(run(staircase, tensors, truth), truth)) < 1e-13
    assert emulator.forward_calls == 1


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_installed_torch_has_the_emulated_form(name):
    """Names and order of the arguments, and that those which are not given may be left out."""
    operation = getattr(torch.ops.aten, f"_flash_attention_{name}").default
    assert getattr(flash, f"_flash_{name}") is operation
    emulated = list(inspect.signature(getattr(FlashEmulator, name)).parameters)[1:]
    arguments = operation._schema.arguments
    positional = [x.name for x in arguments if not x.kwarg_only]
    assert [*positional, "scale"] == emulated
    assert all(x.has_default_value() for x in arguments if x.kwarg_only)


def test_laid_out_once_per_staircase(emulator):
    staircase, num_keys = ragged(LIMITS[1])
    device = torch.device("cpu")
    assert flash._levels_of(staircase, num_keys, device) is flash._levels_of(
        staircase, num_keys, device
    )


def test_row_numbers_beyond_int32_are_refused_and_offsets_are_int64():
    rows = flash._Rows.of(np.array([2**33, 2**34]), np.array([2, 3]), torch.device("cpu"))
    assert rows.where.tolist() == [2**33, 2**33 + 1, 2**34, 2**34 + 1, 2**34 + 2]
    one = flash._Rows.of(np.array([2**33, 2**33 + 2]), np.array([2, 3]), torch.device("cpu"))
    assert one.where == slice(2**33, 2**33 + 5)
    # Q x K beyond 2^31 with few rows: nothing overflows on the way to the lengths.
    level = flash._lay_out(
        np.array([[0], [0]]), np.array([[2**30], [2**31 - 1]]), torch.device("cpu")
    )
    assert level.lengths[0].tolist() == [0, 2**30]
    assert level.lengths[1].tolist() == [0, 2**31 - 1]
    assert level.lengths[2:] == (2**30, 2**31 - 1)
    staircase = build_staircase(np.zeros(1, int), np.ones(1, int), 1)
    with pytest.raises(ConfigError, match=r"2147483648 rows.*at most 2147483647"):
        flash._levels_of(staircase, 2**31, torch.device("cpu"))


@pytest.mark.parametrize("lse_scale", [math.log2(math.e), 0.5])
def test_an_lse_of_another_base_would_show(monkeypatch, lse_scale):
    FlashEmulator(lse_scale).install(monkeypatch, flash)
    staircase, num_keys = ragged(LIMITS[0])
    tensors = inputs(staircase.num_rows, num_keys, 4, 2)
    mask = visible_mask(staircase, num_keys)
    truth = partial_truth(*tensors, mask, mask, SCALE)
    assert errors(run(staircase, tensors, truth), truth)[0] > 1e-3


def test_what_the_operations_do_not_take():
    """The emulator refuses what the real ones would answer wrongly."""
    q, k, v, grad_out = inputs(6, 5, 4, 2)
    lse = torch.zeros(4, 6, dtype=torch.float64)
    state = torch.zeros(2, dtype=torch.uint64)
    good = {
        "q": q,
        "k": k,
        "v": v,
        "cu_q": torch.tensor([0, 2, 6], dtype=torch.int32),
        "cu_k": torch.tensor([0, 4, 5], dtype=torch.int32),
        "max_q": 4,
        "max_k": 4,
    }
    emulator = FlashEmulator()

    def forward(**changes):
        return emulator.forward(*(good | changes).values(), 0.0, False, False, scale=SCALE)

    def backward(grad_out=grad_out, out=q, lse=lse):
        lengths = (good["cu_q"], good["cu_k"], 4, 4)
        return emulator.backward(
            grad_out, q, k, v, out, lse, *lengths, 0.0, False, state, state, scale=SCALE
        )

    forward()
    backward()
    int32 = {"dtype": torch.int32}
    for changes in (
        {"cu_q": good["cu_q"].long()},
        {"cu_q": torch.tensor([0, 0, 6], **int32)},
        {"cu_k": torch.tensor([0, 5, 5], **int32)},
        {"cu_k": torch.tensor([0, 4, 4], **int32)},
        {"cu_k": torch.tensor([0, 5], **int32)},
        {"max_q": 3},
        {"q": q[..., :4], "k": k[..., :4], "v": v[..., :4]},
        {"k": k.float()},
        {"q": torch.stack([q, q], -1)[..., 0]},
    ):
        with pytest.raises(ContractError):
            forward(**changes)
    for changes in (
        {"lse": lse.T},
        {"lse": lse.float()},
        {"lse": torch.full_like(lse, -torch.inf)},
        {"out": q.float()},
        {"grad_out": grad_out[:5]},
    ):
        with pytest.raises(ContractError):
            backward(**changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
def test_on_a_gpu(heads):
    rng = np.random.default_rng(0)
    documents = [(n, np.sort(rng.choice(n, 90, replace=False)).tolist(), 2) for n in (3000, 1100)]
    layout, length = layout_of(documents, block_size=16)
    plan = build_plan(layout, length, 2)
    staircase, num_keys = plan.staircase(0, flash.LEAF_LIMITS), plan.num_rows(0)
    tensors = inputs(staircase.num_rows, num_keys, *heads, width=128, dtype=torch.bfloat16)
    tensors = [x.cuda() for x in tensors]
    mask = visible_mask(staircase, num_keys).cuda()
    truth = partial_truth(*tensors, mask, mask, 128**-0.5)
    q, k, v, grad_out = tensors
    out, lse = flash.forward(q, k, v, staircase, 128**-0.5)
    grads = flash.backward(
        grad_out,
        q,
        k,
        v,
        truth.whole_out.bfloat16(),
        truth.whole_lse.float(),
        staircase,
        128**-0.5,
    )
    assert max(errors((out, lse, *grads), truth)) < 1e-2
