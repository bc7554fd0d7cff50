"""`SplitKVCoreAttention` without draft blocks, on one process: what it sees, copies and refuses."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from megatron_splitkv.attention import (
    SplitKVCoreAttention,
    SplitKVOptions,
    SplitKVPackedSeqParams,
    general,
    visibility,
)
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import RowPlan, even_positions
from megatron_splitkv.testing import relative_error
from tests.attention.test_core_attention import HEADS, KEY_HEADS, WIDTH, build, config

MASK = AttnMaskType


def tensors(
    rows: int, keys: int, batch: int | None = 1, key_heads: int = KEY_HEADS
) -> list[torch.Tensor]:
    """Query, key and value in fp64; packed without a batch."""
    generator = torch.Generator().manual_seed(0)
    samples = () if batch is None else (batch,)
    shapes = ((rows, *samples, HEADS), (keys, *samples, key_heads), (keys, *samples, key_heads))
    return [torch.randn(*s, WIDTH, dtype=torch.float64, generator=generator) for s in shapes]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """``[sq, b, n, d]`` and ``visible [b, sq, sk]`` -> ``[sq, b, n * d]``; 0 for blind rows."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * WIDTH**-0.5
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def assert_equal_with_gradients(
    module: SplitKVCoreAttention,
    inputs: list[torch.Tensor],
    visible: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = module(*leaves, mask, **kwargs)
    twins = [x.clone().requires_grad_() for x in inputs]
    unpacked = [x if x.ndim == 4 else x[:, None] for x in twins]
    expected = dense(*unpacked, visible).reshape(out.shape)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wanted = [expected, *torch.autograd.grad(expected, twins, grad)]
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 1e-12


def causal(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.ones(batch, rows, rows, dtype=torch.bool).tril()


@pytest.mark.parametrize("kernel", ["naive", "cpu"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_causal(batch: int, key_heads: int, kernel: str) -> None:
    module = build(config(num_query_groups=key_heads), attn_mask_type=MASK.causal, kernel=kernel)
    assert_equal_with_gradients(module, tensors(17, 17, batch, key_heads), causal(17, batch))


@pytest.mark.parametrize("mask_type", [MASK.no_mask, MASK.padding, MASK.arbitrary])
def test_cross_attention_without_mask(mask_type: AttnMaskType) -> None:
    visible = torch.ones(2, 5, 31, dtype=torch.bool)
    assert_equal_with_gradients(
        build(config()), tensors(5, 31, 2), visible, attn_mask_type=mask_type
    )


@pytest.mark.parametrize("mask_type", [MASK.no_mask, MASK.padding, MASK.arbitrary])
def test_key_padding_mask(mask_type: AttnMaskType) -> None:
    """Padding behind, before, everywhere and nowhere."""
    hidden = torch.zeros(4, 1, 1, 31, dtype=torch.bool)
    hidden[0, ..., 20:] = hidden[1, ..., :3] = hidden[2] = True
    visible = ~hidden[:, 0].expand(4, 5, 31)
    assert_equal_with_gradients(
        build(config()), tensors(5, 31, 4), visible, mask=hidden, attn_mask_type=mask_type
    )


def test_one_padding_mask_for_all_samples() -> None:
    hidden = torch.arange(31)[None, None, None] > 25
    visible = ~hidden[:, 0].expand(2, 5, 31)
    module = build(config())
    assert_equal_with_gradients(module, tensors(5, 31, 2), visible, mask=hidden)


def test_padded_causal() -> None:
    hidden = torch.arange(12) >= torch.tensor([12, 7])[:, None]
    visible = causal(12, 2) & ~hidden[:, None]
    assert_equal_with_gradients(
        build(config(), attn_mask_type=MASK.padding_causal),
        tensors(12, 12, 2),
        visible,
        mask=hidden[:, None, None],
    )


@pytest.mark.parametrize("before", [0, 1, 4, 50])
def test_window(before: int) -> None:
    module = build(config(window_size=(before, 0)), attn_mask_type=MASK.causal)
    visible = causal(19) & torch.ones(19, 19, dtype=torch.bool).triu(-before)
    assert_equal_with_gradients(module, tensors(19, 19), visible)


def test_layers_without_the_window_and_windows_that_are_none() -> None:
    layers = config(window_size=(2, 0), window_attn_skip_freq=2)
    assert [build(layers, layer_number=n).window for n in (1, 2, 3)] == [3, None, 3]
    assert build(config(window_size=(-1, -1))).window is None


def packed(*bounds: int, kv: tuple[int, ...] | None = None, **changes: Any) -> PackedSeqParams:
    q = torch.tensor(bounds, dtype=torch.int32)
    kv_bounds = q if kv is None else torch.tensor(kv, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=kv_bounds, **changes)


def documents(bounds: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.searchsorted(bounds, np.arange(bounds[-1]), side="right"))


@pytest.mark.parametrize("batched", [False, True])
def test_packed_documents(batched: bool) -> None:
    bounds = (0, 5, 6, 6, 20)
    params = packed(*bounds)
    if batched:  # as Megatron's data loader collates them
        params.cu_seqlens_q = params.cu_seqlens_kv = params.cu_seqlens_q[None]
    document = documents(bounds)
    visible = causal(20) & (document[:, None] == document)
    assert_equal_with_gradients(
        build(config(), attn_mask_type=MASK.causal),
        tensors(20, 20, None),
        visible,
        packed_seq_params=params,
    )


def test_packed_and_padded_documents() -> None:
    """The rows behind a document's end see nothing, are not seen and give 0."""
    padded, lengths = (0, 8, 12), (5, 4)
    real = torch.tensor([0, 5, 9])
    bounds = torch.tensor(padded)
    params = packed(cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds)
    params.cu_seqlens_q = params.cu_seqlens_kv = real
    place = torch.arange(12) - torch.tensor([0, 8]).repeat_interleave(torch.tensor([8, 4]))
    is_real = place < torch.tensor(lengths).repeat_interleave(torch.tensor([8, 4]))
    document = documents(padded)
    visible = causal(12) & (document[:, None] == document) & is_real[:, None]
    assert_equal_with_gradients(
        build(config(), attn_mask_type=MASK.causal),
        tensors(12, 12, None),
        visible,
        packed_seq_params=params,
    )


def test_packed_cross_attention() -> None:
    queries, keys = (0, 3, 7), (0, 11, 30)
    visible = (documents(queries)[:, None] == documents(keys))[None]
    assert_equal_with_gradients(
        build(config(), attn_mask_type=MASK.padding),
        tensors(7, 30, None),
        visible,
        packed_seq_params=packed(*queries, kv=keys),
    )


def test_a_plan_of_the_users() -> None:
    order = np.random.default_rng(0).permutation(24)
    visible = torch.from_numpy(order[:, None] >= order)[None]
    params = SplitKVPackedSeqParams(plan=RowPlan.of_causal(order[None]))
    assert_equal_with_gradients(build(config()), tensors(24, 24), visible, packed_seq_params=params)


# What is copied


def spy(module: SplitKVCoreAttention, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The q, k, v that reach the strategy."""
    with mock.patch.object(general, "splitkv_attention", wraps=general.splitkv_attention) as run:
        module(*args, **kwargs)
    return list(run.call_args.args[:3])


def test_one_sample_is_not_copied() -> None:
    inputs = tensors(12, 12)
    reached = spy(build(config(), attn_mask_type=MASK.causal), *inputs)
    assert [x.data_ptr() for x in reached] == [x.data_ptr() for x in inputs]
    inputs = tensors(12, 12, None)
    module = build(config(), attn_mask_type=MASK.causal)
    reached = spy(module, *inputs, packed_seq_params=packed(0, 5, 12))
    assert [x.data_ptr() for x in reached] == [x.data_ptr() for x in inputs]


def test_only_what_must_move_is_permuted() -> None:
    """Keys out of order under queries that all see the same: the queries stay."""
    keys = np.random.default_rng(1).permutation(9)[None]
    plan = RowPlan.of_documents(even_positions(1, 4, 1), keys, [0, 4], [0, 9])
    inputs = tensors(4, 9)
    reached = spy(build(config()), *inputs, packed_seq_params=SplitKVPackedSeqParams(plan=plan))
    assert [x.data_ptr() == y.data_ptr() for x, y in zip(reached, inputs, strict=True)] == [
        True,
        False,
        False,
    ]


# Plans are made, and tensors read, once a micro-batch


@pytest.fixture(autouse=True)
def _forget_plans() -> None:
    visibility._PLANS.clear()


def reads(run: Callable[[], Any]) -> int:
    """How often a tensor is brought to the host."""
    count, right = 0, torch.Tensor.cpu

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return right(self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "cpu", counted):
        run()
    return count


def test_layers_share_a_plan_and_one_read_of_cu_seqlens() -> None:
    layers = [build(config(), attn_mask_type=MASK.causal, layer_number=n) for n in (1, 2, 3)]
    inputs, params = tensors(12, 12, None), packed(0, 4, 12)
    padded = torch.tensor([0, 4, 12])
    params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = padded, padded.clone()

    def step() -> None:
        for layer in layers:
            layer(*inputs, None, packed_seq_params=params)

    assert reads(step) == 1
    assert reads(step) == 0
    params.cu_seqlens_kv_padded = padded.clone()
    assert reads(step) == 0, "another tensor that says the same"
    with mock.patch.object(RowPlan, "of_causal", side_effect=AssertionError("built again")):
        step()


def test_a_padding_mask_is_read_once_also_under_recompute() -> None:
    module, inputs = build(config()), [x.requires_grad_() for x in tensors(3, 10, 2)]
    mask = torch.zeros(2, 1, 1, 10, dtype=torch.bool)
    mask[1, ..., 6:] = True

    def attend(*args: torch.Tensor) -> torch.Tensor:
        return module(*args[:3], args[3].detach())

    def step() -> None:
        checkpoint(attend, *inputs, mask, use_reentrant=True).sum().backward()

    assert reads(step) == 1
    mask[0, ..., 9:] = True
    assert reads(step) == 1, "written in place: another mask"


def test_a_mask_may_hide_any_keys() -> None:
    module, inputs = build(config()), [x.requires_grad_() for x in tensors(3, 10, 2)]
    mask = torch.zeros(2, 1, 1, 10, dtype=torch.bool)
    mask[0, ..., [2, 3, 7]] = True
    mask[1, ..., [0, 9]] = True
    visible = ~mask[:, 0].expand(2, 3, 10)
    out, expected = module(*inputs, mask), dense(*inputs, visible)
    assert relative_error(out, expected) < 1e-12
    grad_out = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, grad_out) for x in (out, expected))
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 1e-12


def test_a_changed_host_array_is_seen() -> None:
    """cu_seqlens that share their memory with numpy are written without a new version."""
    module, inputs = build(config(), attn_mask_type=MASK.causal), tensors(12, 12, None)
    array = np.array([0, 4, 12])
    bounds = torch.from_numpy(array)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    before = module(*inputs, None, packed_seq_params=params)
    array[1] = 9
    after = module(*inputs, None, packed_seq_params=params)
    assert relative_error(before[:4], after[:4]) < 1e-12
    assert relative_error(before[4:9], after[4:9]) > 0.1


def test_vectors_of_one_memory_are_told_apart() -> None:
    rows = torch.tensor([0, 4, 9, 12])
    identities = {visibility._identity(x) for x in (rows, rows[:3], rows[::2], rows.float())}
    assert len(identities) == 4


def test_bounds_without_the_packed_format_are_refused() -> None:
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_kv=torch.tensor([0, 4]))
    with pytest.raises(ConfigError, match="cu_seqlens are given with qkv_format None"):
        build(config())(*tensors(4, 4), None, packed_seq_params=params)


def test_a_changed_mask_is_seen() -> None:
    module, inputs = build(config()), tensors(3, 10)
    mask = torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    for end in (10, 4, 7):
        mask.copy_(torch.arange(10)[None, None, None] >= end)
        visible = ~mask[:, 0].expand(1, 3, 10)
        assert relative_error(module(*inputs, mask), dense(*inputs, visible)) < 1e-12
    with torch.inference_mode():
        mask = torch.arange(10)[None, None, None] >= 5
        visible = ~mask[:, 0].expand(1, 3, 10)
        assert relative_error(module(*inputs, mask), dense(*inputs, visible)) < 1e-12


def test_memory_of_a_lost_mask_is_not_mistaken_for_it() -> None:
    module, inputs = build(config()), tensors(3, 10)
    for end in range(1, 40):
        mask = torch.arange(10)[None, None, None] >= end % 10 + 1
        visible = ~mask[:, 0].expand(1, 3, 10)
        assert relative_error(module(*inputs, mask), dense(*inputs, visible)) < 1e-12
        del mask
    assert len(visibility._PLANS) <= 8


# Refusals


def square_mask(rows: int) -> torch.Tensor:
    return torch.zeros(1, 1, rows, rows, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask_type", "rows", "keys", "mask", "message"),
    [
        (MASK.causal, 4, 9, None, "4 query rows and 9 keys a rank"),
        (MASK.causal, 9, 9, square_mask(9), "with mask type causal, which says all"),
        (MASK.arbitrary, 9, 9, square_mask(9), "takes no attention mask of shape (1, 1, 9, 9)"),
        (MASK.padding, 9, 9, torch.zeros(1, 1, 1, 9), "torch.float32: only a key padding mask"),
    ],
)
def test_masks_it_cannot_use(
    mask_type: AttnMaskType, rows: int, keys: int, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config(), attn_mask_type=mask_type)(*tensors(rows, keys), mask)


@pytest.mark.parametrize(
    ("params", "mask_type", "message"),
    [
        (packed(0, 5), MASK.causal, "cu_seqlens end at 5, but 1 ranks with 9 query rows each"),
        (packed(0, 9, kv=(0, 4, 9)), MASK.causal, "needs equal cu_seqlens for queries and keys"),
        (packed(0, 9), MASK.arbitrary, "mask type arbitrary for packed sequences"),
        (packed(0, 9, local_cp_size=1), MASK.causal, "hybrid context parallelism"),
        (PackedSeqParams(qkv_format="thd"), MASK.causal, "need cu_seqlens_q and cu_seqlens_kv"),
        (PackedSeqParams(), MASK.causal, "query is (9, 4, 8) and key (9, 2, 8)"),
        (SplitKVPackedSeqParams(), MASK.causal, "splitkv needs the plan of the micro-batch"),
        (
            SplitKVPackedSeqParams(plan=RowPlan.of_causal([[0, 1], [2, 3]])),
            MASK.causal,
            "the plan is for 2 context-parallel ranks, the group has 1",
        ),
        (
            SplitKVPackedSeqParams(plan=RowPlan.of_causal([[0, 1, 2]])),
            MASK.causal,
            "query has 9 rows (all samples together), the plan gives rank 0 3",
        ),
    ],
)
def test_packed_sequences_it_cannot_use(
    params: PackedSeqParams, mask_type: AttnMaskType, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config(), attn_mask_type=mask_type)(*tensors(9, 9, None), packed_seq_params=params)


def test_masks_beside_packing_or_a_plan_are_refused() -> None:
    module, mask = build(config(), attn_mask_type=MASK.causal), torch.zeros(1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="no attention mask for packed sequences"):
        module(*tensors(9, 9, None), mask, packed_seq_params=packed(0, 9))
    params = SplitKVPackedSeqParams(plan=RowPlan.of_causal([np.arange(9)]))
    with pytest.raises(ConfigError, match="the plan says who sees what"):
        module(*tensors(9, 9), mask, packed_seq_params=params)


def test_windows_need_causal_rows() -> None:
    with pytest.raises(ConfigError, match="window 5: only causal rows have a window"):
        build(config(window_size=(4, 0)))(*tensors(3, 9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "hidden"}, "--splitkv-gather hidden needs the projections"),
        ({"scatter": "proj"}, "--splitkv-scatter proj needs the projections"),
    ],
)
def test_places_that_need_the_projections(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config(), options=SplitKVOptions(**options))(*tensors(3, 9))


def test_heads_and_widths_that_do_not_fit() -> None:
    q, k, v = tensors(3, 9)
    module = build(config())
    with pytest.raises(ConfigError, match="4 query heads of width 8, 2 key heads of width 8 and 2"):
        module(q, k, v[..., :4])
    with pytest.raises(ConfigError, match=r"value is torch.float32 and query torch.float64"):
        module(q, k, v.float())
