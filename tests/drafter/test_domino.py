"""Domino's labels and weights, pinned by small integers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.loss import slot_weights
from tests.drafter.harness import TINY, TINY_DOMINO, Sample

UNSHIFTED = replace(TINY_DOMINO, shift_label=False)
LENGTH, SECOND = 16, 10  # a document ends at position 10


def block_at(anchor: int, drafter: DominoConfig, loss_mask: np.ndarray) -> dict[str, list[float]]:
    """Token id = 100 + position, B = 4, gamma = 2."""
    pack = Pack(
        document_ids=np.arange(2),
        cu_seqlens=np.array([0, SECOND, LENGTH]),
        token_ids=100 + np.arange(LENGTH),
        loss_mask=loss_mask,
    )
    start = 0 if anchor < SECOND else SECOND
    layout = BlockLayout(np.array([anchor]), np.array([start]), np.array([True]), 4)
    sample = Sample(pack, layout, torch.zeros(LENGTH, TINY.feature_width))
    batch = sample.batch(sample.plan(1), 0, label_shift=drafter.label_shift)
    weights = slot_weights(
        batch["block_label_mask"], 4, drafter.loss_decay_gamma, drafter.first_trained_slot
    )
    return {
        "input": batch["block_tokens"].tolist(),
        "read": batch["block_real_tokens"].tolist(),
        "labels": batch["block_labels"].tolist(),
        "positions": batch["block_positions"].tolist(),
        "weights": weights.tolist(),
    }


def weights_of(*distances: float | None) -> list[float]:
    """``exp(-distance / 2)``, 0 for None."""
    weights = [0.0 if d is None else math.exp(-d / 2) for d in distances]
    return pytest.approx(weights)  # type: ignore[return-value]


MASK = TINY.mask_token_id
EVERYWHERE = np.ones(LENGTH, dtype=bool)


def test_shifted_labels_are_the_tokens_behind_the_slots() -> None:
    block = block_at(3, TINY_DOMINO, EVERYWHERE)
    assert block["input"] == [103, MASK, MASK, MASK]
    assert block["positions"] == [3, 4, 5, 6]
    assert block["read"] == [103, 104, 105, 106]
    assert block["labels"] == [104, 105, 106, 107]
    assert block["weights"] == weights_of(0, 1, 2, 3)


def test_labels_that_are_not_shifted_are_the_tokens_of_the_slots() -> None:
    block = block_at(3, UNSHIFTED, EVERYWHERE)
    assert block["input"] == [103, MASK, MASK, MASK]
    assert block["read"] == [103, 104, 105, 106]
    assert block["labels"][1:] == [104, 105, 106]
    assert block["weights"] == weights_of(None, 0, 1, 2)


def test_labels_end_with_the_document_and_the_response() -> None:
    shifted, unshifted = (block_at(8, drafter, EVERYWHERE) for drafter in (TINY_DOMINO, UNSHIFTED))
    assert shifted["read"] == unshifted["read"] == [108, 109, 0, 0]
    assert shifted["labels"] == [109, 0, 0, 0]
    assert shifted["weights"] == weights_of(0, None, None, None)
    assert unshifted["labels"][1:] == [109, 0, 0]
    assert unshifted["weights"] == weights_of(None, 0, None, None)

    hole = EVERYWHERE.copy()
    hole[12] = False  # a token that is read, but never learnt
    block = block_at(10, TINY_DOMINO, hole)
    assert block["read"] == [110, 111, 112, 113]
    assert block["labels"] == [111, 112, 113, 114]
    assert block["weights"] == weights_of(0, None, 2, 3)


def test_proposals_and_trained_slots() -> None:
    assert (TINY_DOMINO.first_trained_slot, TINY_DOMINO.num_proposals) == (0, 4)
    assert (UNSHIFTED.first_trained_slot, UNSHIFTED.num_proposals) == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emb_dim": 0}, "emb_dim is 0"),
        ({"pure_draft_prefix_len": 5}, "must be at least 0 and below the"),
        ({"base_loss_decay_ratio": 0.0}, "base_loss_decay_ratio is 0.0"),
    ],
)
def test_impossible_drafters_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY_DOMINO, **change)
