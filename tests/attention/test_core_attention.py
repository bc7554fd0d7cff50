"""`SplitKVCoreAttention` behind Megatron's interface."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from megatron_splitkv.attention import (
    SplitKVCoreAttention,
    SplitKVOptions,
    SplitKVPackedSeqParams,
    context_parallel_attention,
)
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import gloo_pool, reference_attention, relative_error
from tests.distributed.attention_problem import Problem, own_slice, shard_keys

S, HEADS, KEY_HEADS, WIDTH, B = 20, 4, 2, 8, 4


def config(**changes: Any) -> TransformerConfig:
    options: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HEADS * WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": KEY_HEADS,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**(options | changes))


def build(configuration: TransformerConfig, **options: Any) -> SplitKVCoreAttention:
    """As Megatron's `Attention` builds it: from a spec, by keyword."""
    arguments = {
        "config": configuration,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.no_mask,
        "attention_type": "cross",
        "cp_comm_type": "splitkv",
        "softmax_scale": None,
        "pg_collection": None,
    }
    return build_module(ModuleSpec(module=SplitKVCoreAttention), **(arguments | options))


def _plan() -> ContextPlan:
    layout = BlockLayout(np.array([5, 11]), np.array([0, 0]), np.array([True, True]), block_size=B)
    return build_plan(layout, S, 1)


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = ((2 * B, HEADS), (S + 2 * B, KEY_HEADS), (S + 2 * B, KEY_HEADS))
    return [torch.randn(n, 1, h, WIDTH, generator=generator) for n, h in rows]


def test_interface_shapes_and_values() -> None:
    plan, (q, k, v) = _plan(), _inputs()
    module = build(config())
    out = module(
        q,
        k,
        v,
        None,
        attn_mask_type=AttnMaskType.no_mask,
        attention_bias=None,
        packed_seq_params=SplitKVPackedSeqParams(plan=plan),
    )
    assert out.shape == (2 * B, 1, HEADS * WIDTH)
    expected, _ = reference_attention(q[:, 0], k[:, 0], v[:, 0], plan.layout)
    assert relative_error(out, expected.flatten(1)[:, None]) < 1e-6
    scaled = build(config(), softmax_scale=0.1)(
        q, k, v, None, packed_seq_params=SplitKVPackedSeqParams(plan=plan)
    )
    expected, _ = reference_attention(q[:, 0], k[:, 0], v[:, 0], plan.layout, softmax_scale=0.1)
    assert relative_error(scaled, expected.flatten(1)[:, None]) < 1e-6


def test_block_keys_apart_equal_block_keys_behind_the_context() -> None:
    params, (q, k, v) = SplitKVPackedSeqParams(plan=_plan()), _inputs()
    module = build(config())
    apart = module(
        q, k[:S], v[:S], None, packed_seq_params=params, block_key=k[S:], block_value=v[S:]
    )
    assert torch.equal(apart, module(q, k, v, None, packed_seq_params=params))


@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_window_of_draft_blocks(window: int) -> None:
    plan, (q, k, v) = _plan(), _inputs()
    params = SplitKVPackedSeqParams(plan=plan)
    module = build(config(), block_window=window)
    expected, _ = reference_attention(q[:, 0], k[:, 0], v[:, 0], plan.layout, window=window)
    found = [
        module(q, k, v, None, packed_seq_params=params),
        module(q, k[:S], v[:S], None, packed_seq_params=params, block_key=k[S:], block_value=v[S:]),
    ]
    for out in found:
        assert relative_error(out, expected.flatten(1)[:, None]) < 1e-6
    with pytest.raises(ConfigError, match="window 0 must be at least 1"):
        build(config(), block_window=0)


def test_extra_keywords_of_later_versions_are_accepted() -> None:
    module = build(config(), something_new=1)
    q, k, v = _inputs()
    params = SplitKVPackedSeqParams(plan=_plan())
    module(q, k, v, None, packed_seq_params=params, something_newer=2)


def test_recompute_gives_the_same_gradients() -> None:
    module, params = build(config()), SplitKVPackedSeqParams(plan=_plan())
    gradients = []
    for recompute in (False, True):
        leaves = [x.requires_grad_() for x in _inputs()]

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return module(*qkv, None, packed_seq_params=params)

        out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_params_are_megatron_params_without_a_format() -> None:
    params = SplitKVPackedSeqParams(plan=_plan())
    assert isinstance(params, PackedSeqParams)
    assert params.qkv_format is None, "'thd' would switch on Megatron's zigzag RoPE"


@pytest.mark.parametrize("name", ["split_kv", "SplitKV", "a2a+p2p"])
def test_unknown_cp_comm_type_names_the_allowed(name: str) -> None:
    message = f"--cp-comm-type {name!r} is not known; choose one of: splitkv, a2a, p2p"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config(), cp_comm_type=name)


@pytest.mark.parametrize("name", ["p2p", "a2a", "ringx"])
def test_peers_are_for_draft_blocks_alone(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of a self-attention layer is Megatron's own"):
        build(config(), cp_comm_type=name, attention_type="self")
    module = build(config(), cp_comm_type=name)
    assert module.strategy == name
    rows = torch.zeros(6, 1, HEADS, WIDTH)
    with pytest.raises(ConfigError, match=f"--cp-comm-type {name} is for draft blocks here"):
        module(rows, rows, rows, None)


def test_layers_of_one_spec_take_their_own_of_its_options() -> None:
    options = SplitKVOptions(gather="q", scatter="heads", save="own", fp32_reduce=True)
    taken = {
        name: build(config(), cp_comm_type=name, options=options).options
        for name in ("splitkv", "p2p", "all_gather")
    }
    assert taken == {
        "splitkv": options,
        "p2p": SplitKVOptions(),
        "all_gather": SplitKVOptions(save="own"),
    }


def test_no_cp_comm_type_is_megatrons_way_of_one_rank() -> None:
    assert build(config(), cp_comm_type=None).strategy == "splitkv"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"attention_dropout": 0.1}, {}, "--attention-dropout 0.1"),
        ({}, {"attention_dropout": 0.2}, "--attention-dropout 0.2"),
        ({"apply_query_key_layer_scaling": True}, {}, "--apply-query-key-layer-scaling"),
        ({"window_size": (127, 1)}, {}, "--window-size (127, 1)"),
        ({"qk_clip": True}, {}, "--qk-clip and --log-max-attention-logit"),
        ({"log_max_attention_logit": True}, {}, "--qk-clip and --log-max-attention-logit"),
        ({"softmax_type": "off-by-one"}, {}, "--softmax-type off-by-one"),
        ({}, {"kernel": "fa9"}, "--attention-kernel 'fa9' is not known; choose one of: auto, "),
        ({"context_parallel_size": 2}, {}, "layer 1: pg_collection has no `cp` group"),
        (
            {"context_parallel_size": 2},
            {"pg_collection": SimpleNamespace(cp=None)},
            "layer 1: pg_collection has no `cp` group",
        ),
    ],
)
def test_features_it_lacks_are_refused_by_name(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config(**changes), **options)


@pytest.mark.parametrize("params", [None, PackedSeqParams(), SplitKVPackedSeqParams()])
def test_missing_plan_says_how_to_pass_one(params: PackedSeqParams | None) -> None:
    q, k, v = _inputs()
    blocks = {"block_key": k[S:], "block_value": v[S:]}
    with pytest.raises(ConfigError, match="pass packed_seq_params=SplitKVPackedSeqParams"):
        build(config())(q, k[:S], v[:S], None, packed_seq_params=params, **blocks)


def test_megatrons_windows_are_not_for_draft_blocks() -> None:
    module, params = build(config(window_size=(4, 0))), SplitKVPackedSeqParams(plan=_plan())
    with pytest.raises(ConfigError, match=re.escape("--window-size (4, 0) is not for draft")):
        module(*_inputs(), None, packed_seq_params=params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "takes no attention mask: the plan"),
        ({"attention_bias": torch.zeros(1)}, "takes no attention bias"),
        ({"query": torch.zeros(8, 2, 4, 8)}, "query has shape (8, 2, 4, 8)"),
        ({"key": torch.zeros(28, 2, 8)}, "key has shape (28, 2, 8)"),
        ({"block_key": torch.zeros(8, 1, 2, 8)}, "block_key and block_value come together"),
    ],
)
def test_inputs_it_cannot_use_are_refused(change: dict[str, Any], message: str) -> None:
    q, k, v = _inputs()
    inputs = {"query": q, "key": k, "value": v, "attention_mask": None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config())(**(inputs | change), packed_seq_params=SplitKVPackedSeqParams(plan=_plan()))


DISTRIBUTED = Problem(
    document_lengths=(33, 20), anchors=((3, 9, 20), (1, None, 15)), dtype=torch.float32
)


def _module_and_function() -> tuple[torch.Tensor, torch.Tensor]:
    plan, rank = DISTRIBUTED.plan(2), dist.get_rank()
    q, k, v, _ = DISTRIBUTED.tensors(plan)
    local = (q[own_slice(plan, rank)], shard_keys(k, plan, rank), shard_keys(v, plan, rank))
    groups = ProcessGroupCollection()
    groups.cp = dist.group.WORLD
    module = build(config(context_parallel_size=2), pg_collection=groups)
    out = module(
        *(x.unsqueeze(1) for x in local),
        None,
        packed_seq_params=SplitKVPackedSeqParams(plan=plan),
    )
    expected = context_parallel_attention(*local, plan, dist.group.WORLD)
    return out, expected.flatten(1).unsqueeze(1)


def test_without_context_parallelism_the_group_is_not_used() -> None:
    """A vision encoder beside a language model that has it."""
    assert build(config(), pg_collection=SimpleNamespace(cp=object())).cp_group is None


def test_group_comes_from_the_collection() -> None:
    for out, expected in gloo_pool(2).run(_module_and_function):
        assert torch.equal(out, expected)
