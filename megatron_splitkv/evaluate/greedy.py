"""Plain greedy decoding, the text that speculative decoding has to reproduce, and the comparison.

The near-tie rule: a verified block runs through other matrix shapes than single tokens do, so two
logits that are equal up to rounding may change places. A differing token therefore counts as a
mismatch only if the target's two best logits at that step are further apart than `NEAR_TIE_GAP`;
below it, it is a near-tie: counted, reported, and the rest of the text is then held against the
target's choice given that very text.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

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
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    batch_size: int = 1,
) -> Iterator[tuple[int, GreedyText]]:
    """Decode greedily, one token at a time, with a KV cache.

    Args:
        target: without a text.
        prompts: token ids.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end a text.
        batch_size: texts decoded together; one that has ended makes room for the next prompt.

    Yields:
        ``(index of the prompt, its text)``, in the order in which the texts end.
    """
    running: list[_Text] = []
    coming = iter(enumerate(prompts))
    while True:
        while len(running) < batch_size and (prompt := next(coming, None)) is not None:
            index, tokens = prompt
            logits, features = target.read(tokens)
            text = _Text(index, list(tokens))
            text.add(*_best(logits[None])[0], features)
            if text.has_ended(max_new_tokens, stop_token_ids):
                target.keep([0] * (len(running) + 1), range(len(running)))
                yield text.result()
            else:
                running.append(text)
        if not running:
            return
        logits, features = target.forward([text.new_tokens[-1:] for text in running])
        for text, (token, gap), rows in zip(running, _best(logits[:, 0]), features, strict=True):
            text.add(token, gap, rows)
        over = [text.has_ended(max_new_tokens, stop_token_ids) for text in running]
        staying = [i for i, ended in enumerate(over) if not ended]
        target.keep([1] * len(running), staying)
        finished = [text for text, ended in zip(running, over, strict=True) if ended]
        running = [running[i] for i in staying]
        for text in finished:
            yield text.result()


@dataclass
class _Text:
    """A text while it is decoded."""

    index: int
    prompt: list[int]
    new_tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)

    def add(self, token: int, gap: float, features: torch.Tensor) -> None:
        self.new_tokens.append(token)
        self.gaps.append(gap)
        self.features.append(features)

    def has_ended(self, max_new_tokens: int, stop_token_ids: Collection[int]) -> bool:
        return len(self.new_tokens) >= max_new_tokens or self.new_tokens[-1] in stop_token_ids

    def result(self) -> tuple[int, GreedyText]:
        features = torch.cat(self.features)
        return self.index, GreedyText(self.prompt, self.new_tokens, self.gaps, features)


def _best(logits: torch.Tensor) -> list[tuple[int, float]]:
    """The best token of each row and how far its logit is ahead of the second."""
    values, tokens = logits.topk(2)
    gaps = (values[:, 0] - values[:, 1]).tolist()
    return list(zip(tokens[:, 0].tolist(), gaps, strict=True))


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
        target: without a text; read only if the texts differ.
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
    first_logits, _ = target.read(greedy.prompt)
    choices = first_logits[None]
    if len(new_tokens) > 1:
        logits, _ = target.forward([new_tokens[:-1]])
        choices = torch.cat([choices, logits[0]])
    chosen = choices.gather(1, torch.tensor(new_tokens, device=choices.device)[:, None])
    behind = (choices.amax(dim=1, keepdim=True) - chosen)[:, 0]
    mismatches = (behind > near_tie_gap).nonzero()
    if len(mismatches):
        position = int(mismatches[0])
        return Comparison(equal=False, position=position, gap=float(behind[position]))
    differs = (choices.argmax(dim=1) != chosen.new_tensor(new_tokens)).sum()
    return Comparison(equal=True, near_ties=max(1, int(differs)))
