"""Domino's rollout against the head written out token by token."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.evaluate.domino_head import DominoHead
from megatron_splitkv.evaluate.heads import ProposalHead, proposal_head
from tests.drafter.harness import TINY_DOMINO, frozen_target
from tests.drafter.naive_domino import naive_domino_logits

TEXTS = 3
CONFIGS = [
    TINY_DOMINO,
    replace(TINY_DOMINO, shift_label=False),
    replace(TINY_DOMINO, pure_draft_prefix_len=0, input_embedding_scale=1.7),
    replace(TINY_DOMINO, pure_draft_prefix_len=2, shift_label=False, final_logit_softcapping=5.0),
]


def head_tensors(config: DominoConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.5
        for name, shape in config.head_shapes().items()
    }


def drafted(config: DominoConfig, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(TEXTS, slots, config.hidden_size, generator=generator)
    return hidden, torch.tensor([5, 17, 40])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("slots", [4, 2])
def test_proposals_are_the_argmax_of_the_head_fed_with_them(
    config: DominoConfig, slots: int
) -> None:
    """What training calls teacher forcing, with the proposals as the teacher."""
    tensors, (embedding, head) = head_tensors(config), frozen_target()
    hidden, anchors = drafted(config, slots)
    rollout: ProposalHead = proposal_head(config, tensors)
    assert isinstance(rollout, DominoHead)
    proposals = rollout.propose(hidden, anchors, embedding, head)
    assert proposals.shape == (TEXTS, slots - 1 + config.label_shift)
    assert proposals.dtype == torch.int64
    corrected = 0
    for text in range(TEXTS):
        known = [int(anchors[text])]
        for slot, proposal in enumerate(proposals[text].tolist(), start=config.first_trained_slot):
            base, final = naive_domino_logits(
                config, tensors, embedding, head, hidden[text, slot], known
            )
            corrected += int(final.argmax()) != int(base.argmax())
            assert proposal == int(final.argmax())
            known.append(proposal)
    if slots == config.block_size:
        assert corrected  # the head made a difference


def test_texts_do_not_see_each_other() -> None:
    tensors, (embedding, head) = head_tensors(TINY_DOMINO), frozen_target()
    hidden, anchors = drafted(TINY_DOMINO, 4)
    rollout = proposal_head(TINY_DOMINO, tensors)
    together = rollout.propose(hidden, anchors, embedding, head)
    for text in range(TEXTS):
        mine = slice(text, text + 1)
        alone = rollout.propose(hidden[mine], anchors[mine], embedding, head)
        assert torch.equal(alone, together[mine])


def test_a_longer_block_begins_as_a_shorter_one() -> None:
    tensors, (embedding, head) = head_tensors(TINY_DOMINO), frozen_target()
    hidden, anchors = drafted(TINY_DOMINO, 4)
    rollout = proposal_head(TINY_DOMINO, tensors)
    whole = rollout.propose(hidden, anchors, embedding, head)
    assert torch.equal(rollout.propose(hidden[:, :3], anchors, embedding, head), whole[:, :3])


def test_a_bf16_drafter_of_an_fp32_target_proposes() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in head_tensors(TINY_DOMINO).items()}
    (embedding, head), (hidden, anchors) = frozen_target(), drafted(TINY_DOMINO, 4)
    rollout = proposal_head(TINY_DOMINO, tensors)
    assert rollout.propose(hidden.bfloat16(), anchors, embedding, head).shape == (TEXTS, 4)
