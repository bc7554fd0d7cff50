"""Plain greedy decoding, the text that speculative decoding has to reproduce, and the comparison.

The near-tie rule: a verified block runs through other matrix shapes than single tokens do, so two
logits that are equal up to rounding may change places. A differing token therefore counts as a
mismatch only if the target's two best logits at that step are further apart than `NEAR_TIE_GAP`;
below it, it is a near-tie: counted, reported, and the rest of the text is then held against the
target's choice given that very text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megatron_splitkv.evaluate.cached_target import CachedTarget

NEAR_TIE_GAP = 1e-4


@dataclass(frozen=True)
class GreedyText:
    """A prompt and what the target makes of it, one token at a time.

    Args:
        prompt: token ids.
        new_tokens: what was decoded, a stop token included.
        gaps: how far the best logit was ahead of the second, for every new token.
        features: of all tokens but the last.

    Shape:
        ``features [len(prompt) + len(new_tokens) - 1, C * d]``.
    """

    prompt: list[int]
    new_tokens: list[int]
    gaps: list[float]
    features: torch.Tensor

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return self.prompt + self.new_tokens


@dataclass(frozen=True)
class Comparison:
    """A decoded text held against greedy decoding.

    Args:
        equal: no difference but near-ties.
        near_ties: tokens that differ from the target's first choice by a near-tie.
        position: first new token that is a mismatch, None if there is none.
        gap: by how much the target preferred another token there.
    """

    equal: bool
    near_ties: int = 0
    position: int | None = None
    gap: float | None = None


def greedy_decode(
    target: CachedTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> GreedyText:
    """Decode greedily, one token at a time, with a KV cache.

    Args:
        target: at the start of a text.
        prompt: token ids.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end it.
    """
    new_tokens: list[int] = []
    gaps: list[float] = []
    features: list[torch.Tensor] = []
    unread = list(prompt)
    while len(new_tokens) < max_new_tokens and not (
        new_tokens and new_tokens[-1] in stop_token_ids
    ):
        logits, rows = target.forward(unread, last_only=True)
        target.crop(target.length)
        best = logits[-1].topk(2)
        unread = [int(best.indices[0])]
        new_tokens += unread
        gaps.append(float(best.values[0] - best.values[1]))
        features.append(rows)
    return GreedyText(list(prompt), new_tokens, gaps, torch.cat(features))


def compare_with_greedy(
    new_tokens: Sequence[int],
    greedy: GreedyText,
    target: CachedTarget,
    *,
    near_tie_gap: float = NEAR_TIE_GAP,
) -> Comparison:
    """Tell whether a decoded text is the greedy one, near-ties aside.

    Args:
        new_tokens: decoded after ``greedy.prompt``.
        greedy: the reference.
        target: at the start of a text; read only if the texts differ.
        near_tie_gap: largest logit difference that rounding may explain.
    """
    if list(new_tokens) == greedy.new_tokens:
        return Comparison(equal=True)
    pairs = zip(new_tokens, greedy.new_tokens, strict=False)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:  # one text is the beginning of the other
        return Comparison(equal=False, position=min(len(new_tokens), len(greedy.new_tokens)))
    if greedy.gaps[first] > near_tie_gap:
        return Comparison(equal=False, position=first, gap=greedy.gaps[first])
    logits, _ = target.forward(greedy.prompt + list(new_tokens[:-1]))
    choices = logits[len(greedy.prompt) - 1 :]
    chosen = choices.gather(1, torch.tensor(new_tokens, device=logits.device)[:, None])
    behind = (choices.amax(dim=1, keepdim=True) - chosen)[:, 0]
    mismatches = (behind > near_tie_gap).nonzero()
    if len(mismatches):
        position = int(mismatches[0])
        return Comparison(equal=False, position=position, gap=float(behind[position]))
    differs = (choices.argmax(dim=1) != chosen.new_tensor(new_tokens)).sum()
    return Comparison(equal=True, near_ties=max(1, int(differs)))
