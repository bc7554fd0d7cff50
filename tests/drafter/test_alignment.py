"""Which slot predicts which token, from the pack to the loss."""

import math

import numpy as np
import pytest
import torch

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.loss import slot_weights
from tests.drafter.harness import TINY, Sample


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a7_slot_k_predicts_the_token_at_its_own_position(cp_size: int) -> None:
    """Token id = 100 + position, anchor 5, B = 4, gamma = 2."""
    length = 16
    pack = Pack(
        document_ids=np.zeros(1, dtype=np.int64),
        cu_seqlens=np.array([0, length]),
        token_ids=100 + np.arange(length),
        loss_mask=np.ones(length, dtype=bool),
    )
    layout = BlockLayout(np.array([5]), np.array([0]), np.array([True]), 4)
    sample = Sample(pack, layout, torch.zeros(length, TINY.feature_width))
    batch = sample.batch(sample.plan(cp_size), 0)
    assert batch["block_tokens"].tolist() == [105] + [TINY.mask_token_id] * 3
    assert batch["block_labels"].tolist()[1:] == [106, 107, 108]
    assert batch["block_positions"].tolist() == [5, 6, 7, 8]
    weights = slot_weights(batch["block_label_mask"], 4, gamma=2.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]))
    if cp_size == 2:  # the second rank holds the padding block
        other = sample.batch(sample.plan(2), 1)
        assert not other["block_label_mask"].any()
        assert not other["block_keep_mask"].any()
