"""The public function on one process: what it refuses, and that it copies no keys."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.attention import (
    SplitKVOptions,
    context_parallel_attention,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.strategies import check_heads
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import reference_attention, relative_error

S, N, B, HEADS, KEY_HEADS, WIDTH = 30, 3, 4, 4, 2, 8


@pytest.fixture
def plan() -> ContextPlan:
    layout = BlockLayout(
        anchor_positions=np.array([4, 9, 20]),
        document_starts=np.array([0, 0, 15]),
        block_keep_mask=np.array([True, True, True]),
        block_size=B,
    )
    return build_plan(layout, S, 1)


def _inputs(
    query_rows: int = N * B, key_rows: int = S + N * B, heads: int = HEADS, width: int = WIDTH
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(query_rows, heads), (key_rows, KEY_HEADS), (key_rows, KEY_HEADS)]
    return [torch.randn(*shape, width, generator=generator) for shape in shapes]


def test_softmax_scale_is_used(plan: ContextPlan) -> None:
    q, k, v = _inputs()
    for scale in (None, 0.05, 2.0):
        out = context_parallel_attention(q, k, v, plan, None, softmax_scale=scale)
        expected, _ = reference_attention(q, k, v, plan.layout, softmax_scale=scale)
        assert relative_error(out, expected) < 1e-6


def test_keys_in_two_tensors_are_the_same_keys(plan: ContextPlan) -> None:
    q, k, v = (x.requires_grad_() for x in _inputs())
    grad_out = torch.randn_like(q)
    joint = context_parallel_attention(q, k, v, plan, None)
    expected = torch.autograd.grad(joint, (q, k, v), grad_out)
    parts = [
        x.detach()[rows].requires_grad_() for rows in (slice(S), slice(S, None)) for x in (k, v)
    ]
    split = split_context_parallel_attention(q, *parts, plan, None)
    grads = torch.autograd.grad(split, (q, *parts), grad_out)
    assert torch.equal(split, joint)
    assert torch.equal(grads[0], expected[0])
    assert torch.equal(torch.cat([grads[1], grads[3]]), expected[1])
    assert torch.equal(torch.cat([grads[2], grads[4]]), expected[2])


class _LargestNewStorage(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made and that is no view of another."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_forward_copies_no_keys() -> None:
    layout = BlockLayout(
        np.array([50_000, 59_000]), np.array([0, 0]), np.array([True, True]), block_size=B
    )
    plan = build_plan(layout, 60_000, 1)
    q, k, v = _inputs(2 * B, 60_000 + 2 * B)
    with _LargestNewStorage([q, k, v]) as new:
        context_parallel_attention(q, k, v, plan, None)
    # Only the corner between the anchors, smaller than a tile's worth of a call, may be gathered.
    assert 0 < new.bytes < k.untyped_storage().nbytes() / 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "ring"}, "strategy 'ring' is not known; choose one of: splitkv"),
        ({"kernel": "cuda"}, "kernel 'cuda' is not known; choose one of: auto, naive, cpu, te, "),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"window": 2.5}, "window 2.5 must be at least 1, a query's own position, and an int"),
        ({"plan": None}, "plan is NoneType; give what build_plan returned"),
    ],
)
def test_unknown_choices_name_the_allowed(
    plan: ContextPlan, change: dict[str, Any], message: str
) -> None:
    q, k, v = _inputs()
    with pytest.raises(ConfigError, match=re.escape(message)):
        context_parallel_attention(q, k, v, **({"plan": plan, "cp_group": None} | change))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (_inputs(query_rows=8), "q has 8 rows, the plan gives rank 0 12"),
        (_inputs(key_rows=41), "context k has 29 rows, the plan gives rank 0 30"),
        (_inputs(key_rows=5), "k has 5 rows, fewer than the 12 query rows"),
        (_inputs(heads=3), "3 query heads of width 8 do not group over 2 key heads"),
        ([_inputs()[0][..., :4], *_inputs()[1:]], "4 query heads of width 4 do not group"),
        (
            [_inputs()[0].half(), *_inputs()[1:]],
            "context k is torch.float32 on cpu and q torch.float16 on cpu",
        ),
        ([*_inputs()[:2], _inputs()[2][:, :1]], "k is (42, 2, 8) and v (42, 1, 8)"),
        ([x[:, 0] for x in _inputs()], "q has shape (12, 8); give [rows, heads, width]"),
        ([x.long() for x in _inputs()], "q is torch.int64; give a floating dtype"),
        ([_inputs()[0], *(x.to("meta") for x in _inputs()[1:])], "on meta and q torch.float32 on"),
        ([x[:, :0] for x in _inputs()], "0 query heads of width 8 do not group over 0 key heads"),
        (_inputs(width=0), "4 query heads of width 0"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(
    plan: ContextPlan, inputs: list[torch.Tensor], message: str
) -> None:
    q, k, v = inputs
    with pytest.raises(ConfigError, match=re.escape(message)):
        context_parallel_attention(q, k, v, plan, None)


@pytest.mark.parametrize("strategy", CP_COMM_TYPES)
def test_alone_all_strategies_are_the_same(plan: ContextPlan, strategy: str) -> None:
    q, k, v = _inputs()
    expected = context_parallel_attention(q, k, v, plan, None)
    assert torch.equal(context_parallel_attention(q, k, v, plan, None, strategy=strategy), expected)


def test_an_unknown_strategy_names_the_known(plan: ContextPlan) -> None:
    q, k, v = _inputs()
    with pytest.raises(ConfigError, match="'ring' is not known; choose one of: splitkv, a2a, p2p"):
        context_parallel_attention(q, k, v, plan, None, strategy="ring")
    with pytest.raises(ConfigError, match="'ring' is not known"):
        split_context_parallel_attention(q, k[:S], v[:S], q, q, plan, None, strategy="ring")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "q"}, "--splitkv-gather q means nothing for --cp-comm-type p2p"),
        ({"scatter": "heads"}, "--splitkv-scatter heads means"),
        ({"query_cast": "all"}, "--splitkv-query-cast all means"),
        ({"save": "own"}, "--splitkv-save own means"),
        ({"fp32_reduce": True}, "--splitkv-fp32-reduce means"),
    ],
)
def test_options_of_split_kv_are_refused_by_others(
    plan: ContextPlan, options: dict[str, Any], message: str
) -> None:
    q, k, v = _inputs()
    chosen = SplitKVOptions(**options)
    context_parallel_attention(q, k, v, plan, None, options=chosen)
    with pytest.raises(ConfigError, match=message):
        context_parallel_attention(q, k, v, plan, None, strategy="p2p", options=chosen)


def test_gathered_keys_may_be_gathered_again(plan: ContextPlan) -> None:
    q, k, v = _inputs()
    own = SplitKVOptions(save="own")
    context_parallel_attention(q, k, v, plan, None, strategy="all_gather", options=own)


@pytest.mark.parametrize(
    ("heads", "key_heads", "cp_size", "message"),
    [
        (6, 2, 4, "6 query heads .* do not divide among 4 ranks"),
        (6, 3, 2, "deals 3 key heads .* to 2 context-parallel ranks"),
        (12, 6, 4, "deals 6 key heads .* to 4 context-parallel ranks"),
    ],
)
def test_heads_that_ulysses_cannot_deal_out(
    heads: int, key_heads: int, cp_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_heads(heads, key_heads, cp_size)
    for good in ((4, 4, 2), (4, 2, 4), (12, 4, 4), (6, 1, 3)):
        check_heads(*good)


def test_plan_of_another_group_size_is_refused(plan: ContextPlan) -> None:
    q, k, v = _inputs()
    with pytest.raises(ConfigError, match="plan is for 2 context-parallel ranks, the group has 1"):
        context_parallel_attention(q, k, v, build_plan(plan.layout, S, 2), None)


def test_importing_the_attention_does_not_import_megatron() -> None:
    code = (
        "import sys, megatron_splitkv.attention, megatron_splitkv.testing; "
        "sys.exit('megatron.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
