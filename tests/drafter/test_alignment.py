"""Which slot predicts which token and for how much, from the pack to the loss."""

import math

import numpy as np
import pytest
import torch

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.loss import chunked_draft_loss, slot_weights
from tests.drafter.harness import TINY, Sample


def one_document(length: int, anchors: list[int], unsupervised: tuple[int, ...] = ()) -> Sample:
    """Token id = 100 + position, final hidden state = 1000 + position, B = 4."""
    mask = np.ones(length, dtype=bool)
    mask[list(unsupervised)] = False
    pack = Pack(
        document_ids=np.zeros(1, dtype=np.int64),
        cu_seqlens=np.array([0, length]),
        token_ids=100 + np.arange(length),
        loss_mask=mask,
    )
    n = len(anchors)
    layout = BlockLayout(np.array(anchors), np.zeros(n, dtype=np.int64), np.ones(n, bool), 4)
    final_hidden = 1000.0 + torch.arange(length)[:, None].expand(-1, TINY.hidden_size)
    features = torch.zeros(length, TINY.feature_width)
    return Sample(pack, layout, features, final_hidden=final_hidden)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a7_slot_k_predicts_the_token_at_its_own_position(cp_size: int) -> None:
    """Anchor 5, gamma = 2."""
    sample = one_document(16, [5])
    batch = sample.batch(sample.plan(cp_size), 0)
    assert batch["block_tokens"].tolist() == [105] + [TINY.mask_token_id] * 3
    assert batch["block_real_tokens"].tolist() == [105, 106, 107, 108]
    assert batch["block_labels"].tolist()[1:] == [106, 107, 108]
    assert batch["block_label_mask"].tolist() == [False, True, True, True]
    assert batch["block_positions"].tolist() == [5, 6, 7, 8]
    weights = slot_weights(batch["block_label_mask"], 4, gamma=2.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]))
    if cp_size == 2:  # the second rank holds the padding block
        other = sample.batch(sample.plan(2), 1)
        assert not other["block_label_mask"].any()
        assert not other["block_keep_mask"].any()


def test_a7_at_a_documents_end_and_around_what_is_not_supervised() -> None:
    """The token at 7 is not supervised, the document ends behind 9."""
    sample = one_document(10, [5, 8], unsupervised=(7,))
    batch = sample.batch(sample.plan(1), 0)
    mask = batch["block_label_mask"].view(2, 4)
    assert mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    labels = batch["block_labels"].view(2, 4)
    assert labels[0].tolist() == [105, 106, 107, 108]
    assert labels[1].tolist()[:2] == [108, 109]
    weights = slot_weights(mask.view(-1), 4, gamma=2.0)
    expected = [[0.0, 1.0, 0.0, math.exp(-1.0)], [0.0, 1.0, 0.0, 0.0]]
    torch.testing.assert_close(weights.view(2, 4), torch.tensor(expected))


def test_a7_the_teacher_spoke_of_a_label_one_position_before_it() -> None:
    sample = one_document(10, [5, 8], unsupervised=(7,))
    rows = sample.batch(sample.plan(1), 0, teacher=True)["block_teacher_hidden"][:, 0]
    assert rows.view(2, 4).tolist() == [[0, 1005, 0, 1007], [0, 1008, 0, 0]]


def test_a7_dpace_weighs_a_drafter_that_knows_nothing_and_one_that_knows_all() -> None:
    """Probability 0 counts as 1/2, probability 1 as 1; what is not supervised is passed over."""
    sample = one_document(10, [5, 8], unsupervised=(7,))
    batch = sample.batch(sample.plan(1), 0)
    labels = (batch["block_labels"] - 100).clamp(min=0)  # a vocabulary of 10
    weights = slot_weights(batch["block_label_mask"], 4, gamma=math.inf)
    certain = 200.0 * torch.nn.functional.one_hot(labels, 10).float()
    for hidden, expected in (
        (certain, [[0, 2, 0, 1], [0, 1, 0, 0]]),
        (-certain, [[0, 0.75, 0, 0.25], [0, 0.5, 0, 0]]),
    ):
        found = chunked_draft_loss(hidden, torch.eye(10), labels, weights, dpace_block_size=4)
        assert found.weights.view(2, 4).tolist() == expected
