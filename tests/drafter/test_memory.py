"""What a real drafter layer keeps until backward, against the inventory."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.memory import AttentionSizes
from megatron_splitkv.drafter.memory import layer_saved
from megatron_splitkv.testing.live_storages import LiveStorages
from tests.drafter.harness import TINY, build_model, make_sample, on_ranks, parallel_state

OPTIONS = [
    SplitKVOptions("q", "heads", "all"),
    SplitKVOptions("q", "heads", "all", save="own"),
    SplitKVOptions("hidden", "proj", "all"),
    SplitKVOptions("q", "heads", "group"),
]


def measure(options: SplitKVOptions) -> tuple[int, int, int, int]:
    """Bytes that the second of two layers adds, and rows owned, attended and of context."""
    from megatron_splitkv.drafter import get_dflash_layer_spec

    with parallel_state(1, 2):
        spec = get_dflash_layer_spec("local", splitkv=options)
        model = build_model(1, 2, model_args={"layer_spec": spec})
        sample = make_sample(
            [500] * 4, np.ones(2000, dtype=bool), num_anchors=24, strategy="balanced-local"
        )
        plan = sample.plan(2)
        batch = sample.batch(plan, dist.get_rank())
        model.draft(batch, plan)
        storages, alive = LiveStorages(), []
        storages.ignore(*model.parameters())

        def note(*_: object) -> None:
            time.sleep(0.05)  # gloo's thread lets go of what was sent a little after the wait
            alive.append(storages.live)

        layer = model.decoder.layers[1]
        layer.register_forward_pre_hook(note)
        layer.register_forward_hook(note)
        with storages:
            model.draft(batch, plan)
        cast = plan.query_cast(dist.get_rank(), options.query_cast)
        size = plan.block_size
        return (
            alive[1] - alive[0],
            plan.blocks_per_rank * size,
            cast.blocks.size * size,
            plan.num_rows(dist.get_rank()),
        )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.gather}-{o.scatter}-{o.save}")
def test_saved_by_a_layer(options: SplitKVOptions) -> None:
    for found, own, attended, keys in on_ranks(2, measure, options):
        sizes = AttentionSizes(
            query_rows=2 * own,
            context_rows=2 * keys,
            cp_size=2,
            heads=TINY.num_attention_heads,
            kv_heads=TINY.num_key_value_heads,
            head_dim=TINY.head_dim,
            hidden_size=TINY.hidden_size,
            itemsize=4,
            cast_share=attended / (2 * own),
            options=options,
        )
        expected = layer_saved(sizes, TINY.ffn_hidden_size, fused=False)
        assert found == pytest.approx(sum(expected.values()), rel=0.1)


def test_fused_modules_save_less() -> None:
    sizes = AttentionSizes(32768, 1 << 20, 8, 32, 4, 128, 2048)
    fused, plain = layer_saved(sizes, 6144), layer_saved(sizes, 6144, fused=False)
    assert fused.items() < plain.items()
    grouped = layer_saved(replace(sizes, cast_share=0.25), 6144)
    assert sum(fused.values()) - sum(grouped.values()) == 0.75 * 32768 * 4096 * 2
