"""Sliding windows mean what they mean to the public client, at every step of a generation."""

import numpy as np
import pytest
import torch

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.testing import visibility_mask

client = pytest.importorskip("dflash.model")
B = 4


@pytest.mark.parametrize("window", [1, 3, 4, 6, 100])
def test_the_mask_of_a_draft_step_is_that_of_a_block_with_the_same_anchor(window: int) -> None:
    for anchor in range(12):
        layout = BlockLayout(np.array([anchor]), np.array([0]), np.array([True]), B)
        ours = visibility_mask(layout, anchor, window=window)
        query, key = torch.empty(1, 1, B, 2), torch.empty(1, 1, anchor + B, 2)
        theirs = client._attention_mask(query, key, is_causal=True, sliding_window=window)[0, 0]
        assert torch.equal(ours, theirs)
