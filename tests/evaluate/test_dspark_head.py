"""DSpark's rollout against the heads written out token by token."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.evaluate.dspark_head import DSparkHead
from megatron_splitkv.evaluate.heads import ProposalHead, proposal_head
from tests.drafter.harness import TINY_DSPARK, frozen_target
from tests.drafter.naive_drafter import logits_of
from tests.drafter.naive_dspark import naive_dspark_logits

TEXTS = 3
CONFIGS = [
    TINY_DSPARK,
    replace(TINY_DSPARK, markov_head_type="gated"),
    replace(TINY_DSPARK, markov_head_type="rnn"),
    replace(TINY_DSPARK, markov_head_type="rnn", final_logit_softcapping=5.0),
]
ids = ["vanilla", "gated", "rnn", "rnn-capped"]


def head_tensors(config: DSparkConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in config.head_shapes().items()
    }


def drafted(config: DSparkConfig, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(TEXTS, slots, config.hidden_size, generator=generator)
    return hidden, torch.tensor([5, 17, 40])


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.parametrize("slots", [4, 2])
def test_proposals_are_the_argmax_of_the_heads_fed_with_them(
    config: DSparkConfig, slots: int
) -> None:
    """What training calls teacher forcing, with the proposals as the teacher."""
    tensors, (embedding, head) = head_tensors(config), frozen_target()
    hidden, anchors = drafted(config, slots)
    rollout: ProposalHead = proposal_head(config, tensors)
    assert isinstance(rollout, DSparkHead)
    proposals = rollout.propose(hidden, anchors, embedding, head)
    tokens, confidence = rollout.rollout(hidden, anchors, head)
    assert torch.equal(tokens, proposals)
    assert proposals.shape == confidence.shape == (TEXTS, slots)
    assert proposals.dtype == torch.int64
    corrected = 0
    for text in range(TEXTS):
        known = [int(anchors[text])]
        for slot, proposal in enumerate(proposals[text].tolist()):
            rows = hidden[text, : slot + 1]
            logits, confident = naive_dspark_logits(config, tensors, head, rows, known)
            corrected += int(logits.argmax()) != int(logits_of(config, head, rows[-1]).argmax())
            assert proposal == int(logits.argmax())
            assert float(confidence[text, slot]) == pytest.approx(
                float(confident.sigmoid()), rel=1e-4
            )
            known.append(proposal)
    assert corrected  # the head made a difference


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_texts_do_not_see_each_other_and_longer_blocks_begin_as_shorter_ones(
    config: DSparkConfig,
) -> None:
    tensors, (embedding, head) = head_tensors(config), frozen_target()
    hidden, anchors = drafted(config, 4)
    rollout = proposal_head(config, tensors)
    together = rollout.propose(hidden, anchors, embedding, head)
    for text in range(TEXTS):
        mine = slice(text, text + 1)
        alone = rollout.propose(hidden[mine], anchors[mine], embedding, head)
        assert torch.equal(alone, together[mine])
    assert torch.equal(rollout.propose(hidden[:, :3], anchors, embedding, head), together[:, :3])
