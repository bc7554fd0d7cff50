"""Each layer gets its own entry of a per-layer ``--cp-comm-type``."""

from dataclasses import replace
from typing import Any

import pytest

from tests.drafter.harness import TINY, frozen_target, on_ranks, parallel_state


def _strategies(entries: list[str]) -> list[str]:
    from megatron_splitkv.drafter import DFlashModel, get_dflash_layer_spec

    dflash = replace(TINY, num_layers=len(entries), layer_types=())
    with parallel_state(1, 2):
        config: Any = dflash.to_transformer_config(
            context_parallel_size=2,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            cp_comm_type=entries,
        )
        embedding, head = frozen_target()
        model = DFlashModel(
            config,
            dflash,
            layer_spec=get_dflash_layer_spec("local"),
            embedding_weight=embedding,
            head_weight=head,
        )
        return [layer.self_attention.core_attention.strategy for layer in model.decoder.layers]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a15_layer_i_gets_entry_i(position: int) -> None:
    entries = ["p2p", "all_gather"]
    entries.insert(position, "splitkv")
    assert on_ranks(2, _strategies, entries) == [entries, entries]
