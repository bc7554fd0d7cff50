"""Parts of the drafter model on gloo ranks: frozen vocabulary, heads, memory, precision."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.config import ConfigError
from megatron_splitkv.testing import relative_error
from tests.distributed.steps import step_in
from tests.drafter.harness import (
    TINY,
    awkward_samples,
    build_model,
    data_parallel,
    frozen_target,
    on_ranks,
    parallel_state,
    run_schedule,
)

# Ranks that import Megatron on a busy machine take their time.


def frozen_parts(tied: bool) -> dict[str, Any]:
    with parallel_state(tp=4, cp=1):
        embedding, head = frozen_target()
        from megatron_splitkv.drafter.frozen import FrozenVocabulary

        vocabulary = FrozenVocabulary(
            embedding,
            None if tied else head,
            mask_token_id=TINY.mask_token_id,
            dtype=torch.float32,
            tp_group=dist.group.WORLD,
        )
        anchors = torch.tensor([0, 14, 15, 16, 31, 59])
        tokens = torch.full((6, TINY.block_size), TINY.mask_token_id)
        tokens[:, 0] = anchors
        return {
            "embedded": vocabulary.embed_blocks(tokens.view(-1), TINY.block_size),
            "expected": embedding[tokens.view(-1)],
            "head": vocabulary.head_weight.clone(),
            "start": vocabulary.vocab_start,
            "saved": sorted(vocabulary.state_dict()),
            "buffers": sum(buffer.numel() for buffer in vocabulary.buffers()),
        }


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_vocabulary_is_split_over_tp_and_saved_nowhere(tied: bool) -> None:
    embedding, head = frozen_target()
    parts = on_ranks(4, frozen_parts, tied)
    for part in parts:
        assert torch.equal(part["embedded"], part["expected"])
        assert part["saved"] == []
    assert torch.equal(torch.cat([part["head"] for part in parts]), embedding if tied else head)
    assert [part["start"] for part in parts] == [0, 15, 30, 45]  # 61 rows: the last has 16
    stored = sum(part["buffers"] for part in parts)
    assert stored == embedding.numel() * (1 if tied else 2)


def attend_with_constant_values() -> torch.Tensor:
    """V of key/value head h is h + 1; TP rank r holds head r of 2, and the plan spans CP."""
    with parallel_state(tp=2, cp=2):
        from megatron.core import parallel_state as state

        from megatron_splitkv.attention import SplitKVPackedSeqParams

        model = build_model(2, 2)
        sample = awkward_samples()[0]
        plan = sample.plan(2)
        cp_rank, tp_rank = state.get_context_parallel_rank(), state.get_tensor_model_parallel_rank()
        queries = len(plan.blocks(cp_rank)) * TINY.block_size
        generator = torch.Generator().manual_seed(dist.get_rank())

        def rows(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, 1, heads, TINY.head_dim, generator=generator)

        context, value = rows(plan.num_rows(cp_rank), 1), float(tp_rank + 1)
        block = rows(queries, 1)
        out = model.decoder.layers[0].self_attention.core_attention(
            rows(queries, 2),
            context,
            torch.full_like(context, value),
            None,
            attn_mask_type=None,
            attention_bias=None,
            packed_seq_params=SplitKVPackedSeqParams(plan=plan),
            block_key=block,
            block_value=torch.full_like(block, value),
        )
        keep = torch.from_numpy(plan.layout.block_keep_mask[plan.blocks(cp_rank)])
        return out.view(keep.numel(), -1)[keep] / value


def test_a10_queries_meet_the_key_heads_of_their_own_tp_rank() -> None:
    for ratio in on_ranks(4, attend_with_constant_values):
        assert ratio.numel()
        torch.testing.assert_close(ratio, torch.ones_like(ratio))


class Shapes(TorchDispatchMode):
    """Shapes of everything that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


def shapes_of_a_step() -> tuple[set[tuple[int, ...]], set[tuple[int, ...]], int, int]:
    with parallel_state(tp=1, cp=1):
        model, sample = build_model(1, 1), awkward_samples()[0]
        plan = sample.plan(1)
        batch = sample.batch(plan, 0)
        with Shapes() as forward:
            loss, _, _ = model(batch, plan)
        with Shapes() as backward:
            loss.backward()
        num_context, num_rows = len(batch["context_positions"]), len(batch["block_positions"])
        return forward.seen, backward.seen, num_context, num_rows


def test_context_is_never_joined_with_the_blocks_nor_given_a_gradient() -> None:
    forward, backward, num_context, num_rows = on_ranks(4, shapes_of_a_step)[0]
    joined = num_context + num_rows
    assert (num_context, 1, TINY.num_key_value_heads, TINY.head_dim) in forward
    # Positions, and one cosine and sine per row.
    allowed = {(joined,), (joined, 1), (joined, TINY.head_dim // 2), (joined, TINY.head_dim)}
    assert {shape for shape in forward | backward if joined in shape} <= allowed
    # The projection's backward knows [d, C * d] but no gradient of the features.
    assert (TINY.hidden_size, TINY.feature_width) in backward
    assert not [s for s in backward if num_context in s and TINY.feature_width in s[-1:]]


def first_loss(head_scale: float, final_norm_init: float | None) -> float:
    with parallel_state(tp=1, cp=1):
        head = frozen_target()[1] * head_scale
        arguments = {"head_weight": head, "final_norm_init": final_norm_init}
        ddp = data_parallel(build_model(1, 1, model_args=arguments))
        return run_schedule(ddp, [awkward_samples()[0]] * dist.get_world_size()).loss


@pytest.mark.parametrize("head_scale", [0.1, 1.0, 5.0])
def test_the_first_loss_is_close_to_ln_v_whatever_the_scale_of_the_head(head_scale: float) -> None:
    uniform = math.log(TINY.vocab_size)
    assert on_ranks(4, first_loss, head_scale, None)[0] == pytest.approx(uniform, abs=1.0)
    if head_scale == 5.0:
        assert on_ranks(4, first_loss, head_scale, 1.0)[0] > uniform + 5.0


def test_bf16_is_close_to_fp32() -> None:
    low, full = (on_ranks(4, step_in, dtype)[0] for dtype in (torch.bfloat16, torch.float32))
    assert low.loss == pytest.approx(full.loss, rel=5e-3)
    for name, gradient in low.gradients.items():
        assert relative_error(gradient, full.gradients[name]) < 0.1, name


def refused(change: dict[str, Any], model_args: dict[str, Any]) -> str:
    with parallel_state(tp=1, cp=1):
        try:
            build_model(1, 1, model_args=model_args, **change)
        except ConfigError as refusal:
            return str(refusal)
    return "accepted"


def test_a_target_of_another_size_is_refused() -> None:
    wrong_head = {"head_weight": torch.zeros(TINY.vocab_size, TINY.hidden_size + 1)}
    message = r"output head is \(61, 33\), the drafter needs \(61, 32\)"
    for text in on_ranks(4, refused, {}, wrong_head):
        assert text == f"the target's {message}".replace("\\", "")
