"""Greedy speculative decoding of a few texts at once, counted the way the public client counts.

Every text drafts, is verified and grows by itself; a step does this for all running texts in one
pass of the drafter and one of the target. A text that has ended makes room for the next prompt.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from megatron_splitkv.evaluate.drafters import Drafter


class Verifier(Protocol):
    """A target in the middle of a few texts: `CachedTarget`, or `RecordedTarget` for a replay."""

    def join(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Read a prompt as the last text; return its first new token and its features."""

    def verify(
        self, blocks: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Sequence[torch.Tensor]]:
        """Read a block in every text.

        Returns:
            The target's own token after each token of each block, and each block's features; both
            may be longer than the block.
        """

    def keep(self, counts: Sequence[int], texts: Sequence[int]) -> None:
        """Keep the leading `counts` tokens of each block, then only `texts`, ascending."""


class DraftStep(NamedTuple):
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
    prompts: Sequence[Sequence[int]],
    *,
    num_proposals: int,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    batch_size: int = 1,
) -> Iterator[tuple[int, SpeculativeText]]:
    """Decode prompts: draft blocks, let the target verify them, keep what it agrees with.

    Args:
        target: without a text.
        drafter: proposes; without a text.
        prompts: token ids.
        num_proposals: tokens that a step proposes, fewer where a text must end.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end a text.
        batch_size: texts decoded together; one by one the shapes are those of the public client.

    Yields:
        ``(index of the prompt, its text)``, in the order in which the texts end.
    """
    running: list[_Text] = []
    coming = iter(enumerate(prompts))
    while True:
        while len(running) < batch_size and (prompt := next(coming, None)) is not None:
            index, tokens = prompt
            token, features = target.join(tokens)
            text = _Text(index, [*tokens, token], len(tokens), max_new_tokens, features)
            drafter.join(text.max_length)
            running.append(text)
            if text.has_ended(stop_token_ids):  # by its first token, before any draft
                everyone = range(len(running) - 1)
                target.keep([0] * len(running), everyone)
                drafter.keep(everyone)
                yield running.pop().result()
        if not running:
            return
        counts = [min(num_proposals, text.room) for text in running]
        proposals = drafter.propose(
            [text.tokens for text in running], [text.features for text in running], counts
        )
        blocks = [
            [text.tokens[-1], *drafts] for text, drafts in zip(running, proposals, strict=True)
        ]
        answers, new_features = target.verify(blocks)
        kept = []
        for text, drafts, answer, rows in zip(
            running, proposals, answers, new_features, strict=True
        ):
            kept.append(text.advance(drafts, answer, stop_token_ids))
            text.features = rows[: kept[-1]]
        staying = [i for i, text in enumerate(running) if not text.has_ended(stop_token_ids)]
        target.keep(kept, staying)
        drafter.keep(staying)
        ended = [text for text in running if text.has_ended(stop_token_ids)]
        running = [running[i] for i in staying]
        for text in ended:
            yield text.result()


@dataclass
class _Text:
    """A text while it is decoded; its features are those that the drafter has not seen."""

    index: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    features: torch.Tensor
    steps: list[DraftStep] = field(default_factory=list)

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.max_new_tokens

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.max_length - len(self.tokens)

    def has_ended(self, stop_token_ids: Collection[int]) -> bool:
        return self.room <= 0 or self.tokens[-1] in stop_token_ids

    def advance(
        self, proposals: Sequence[int], answers: Sequence[int], stop_token_ids: Collection[int]
    ) -> int:
        """Add what a step produced; return how many tokens that is."""
        accepted = _agreeing(proposals, answers)
        produced = [*proposals[:accepted], answers[accepted]][: self.room]
        produced = _until_stop(produced, stop_token_ids)
        self.tokens += produced
        kept = len(produced)
        if kept <= accepted:  # the text ended inside the proposals
            self.steps.append(DraftStep(kept, kept, kept))
        else:
            self.steps.append(DraftStep(len(proposals), accepted, kept))
        return kept

    def result(self) -> tuple[int, SpeculativeText]:
        return self.index, SpeculativeText(self.tokens[self.prompt_length :], self.steps)


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
