"""Supervision starts where it is told."""

import torch

from megatron_splitkv.data.corpus import supervised


def test_supervision_starts_at_the_first_response_token() -> None:
    ids = torch.tensor([5, 6, 7, 8])
    for first in range(5):
        sample = supervised(ids, first)
        assert sample.token_ids is ids
        assert sample.loss_mask.dtype == torch.bool
        assert sample.loss_mask.tolist() == [position >= first for position in range(4)]
