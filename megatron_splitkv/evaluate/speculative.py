"""Greedy speculative decoding of one text, counted the way the public client counts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_splitkv.evaluate.drafters import Drafter


class Verifier(Protocol):
    """A target at the start of a text: `CachedTarget`, or `RecordedTarget` for a replay."""

    def prefill(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Read a prompt; return the first new token and the prompt's features."""

    def verify(self, block: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Read a block; return the target's token after each of its tokens, and features."""

    def crop(self, length: int) -> None:
        """Forget the text from position `length` on."""


@dataclass(frozen=True)
class DraftStep:
    """One draft and its verification.

    Args:
        proposed: tokens that the drafter proposed, those behind a stop token not counted.
        accepted: leading ones that the target agreed with.
        produced: tokens that the step added to the text: the accepted ones and the target's own,
            cut at a stop token and at the longest text.
    """

    proposed: int
    accepted: int
    produced: int


@dataclass(frozen=True)
class SpeculativeText:
    """A decoded text and how it came about.

    Args:
        new_tokens: all tokens after the prompt; the first one comes from the prompt itself and
            belongs to no draft step.
        steps: the draft steps.
    """

    new_tokens: list[int]
    steps: list[DraftStep]


def speculative_decode(
    target: Verifier,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> SpeculativeText:
    """Decode one prompt: draft a block, let the target verify it, keep what it agrees with.

    Args:
        target: at the start of a text.
        drafter: proposes.
        prompt: token ids.
        block_size: B; a step proposes B - 1 tokens, fewer where the text must end.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end it.
    """
    max_length = len(prompt) + max_new_tokens
    drafter.start(max_length)
    token, features = target.prefill(prompt)
    tokens = [*prompt, token]
    steps: list[DraftStep] = []
    while len(tokens) < max_length and tokens[-1] not in stop_token_ids:
        anchor = len(tokens) - 1
        room = min(block_size, max_length - anchor)
        proposals = drafter.propose(tokens, features, room - 1)
        answers, features = target.verify([tokens[-1], *proposals])
        accepted = _agreeing(proposals, answers)
        produced = [*proposals[:accepted], answers[accepted]][: max_length - len(tokens)]
        produced = _until_stop(produced, stop_token_ids)
        tokens += produced
        target.crop(anchor + len(produced))
        features = features[: len(produced)]
        kept = len(produced)
        if kept <= accepted:  # the text ended inside the proposals
            steps.append(DraftStep(kept, kept, kept))
        else:
            steps.append(DraftStep(len(proposals), accepted, kept))
    return SpeculativeText(tokens[len(prompt) :], steps)


def _agreeing(proposals: Sequence[int], answers: Sequence[int]) -> int:
    """Length of the longest prefix of the proposals that the target would have said itself."""
    for i, proposal in enumerate(proposals):
        if proposal != answers[i]:
            return i
    return len(proposals)


def _until_stop(tokens: list[int], stop_token_ids: Collection[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: i + 1]
    return tokens
