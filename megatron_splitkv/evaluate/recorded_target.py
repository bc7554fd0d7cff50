"""A target that already spoke: replays greedy texts, so that controls need no second decoding.

Greedy speculative decoding yields the same text whatever drafter proposes. So what a drafter would
have earned can be read off a recorded text: the target's answer to a block is the text itself, as
far as the block agrees with it, and nothing behind the first disagreement is looked at.
"""

from collections.abc import Iterable, Sequence

import torch

from megatron_splitkv.evaluate.greedy import GreedyText

# What the target would say behind the recorded text is unknown and equals no proposal.
_UNKNOWN = -1


class RecordedTarget:
    """Stands in for a `CachedTarget` on the prompts of recorded texts.

    Args:
        texts: what the target said, in the order in which their prompts join.
    """

    def __init__(self, texts: Iterable[GreedyText]) -> None:
        self._coming = iter(texts)
        self._texts: list[GreedyText] = []
        self._lengths: list[int] = []

    def join(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Return the recorded first token and the prompt's features."""
        text = next(self._coming)
        if list(prompt) != text.prompt:
            raise ValueError("a recorded target can only be given the prompts of its texts")
        self._texts.append(text)
        self._lengths.append(len(prompt))
        return text.new_tokens[0], text.features[: len(prompt)]

    def verify(
        self, blocks: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Sequence[torch.Tensor]]:
        """Return the recorded token after each position of the blocks, and features."""
        answers, features = [], []
        for text, start, block in zip(self._texts, self._lengths, blocks, strict=True):
            stop = start + len(block)
            answer = text.tokens[start + 1 : stop + 1]
            answers.append(answer + [_UNKNOWN] * (len(block) - len(answer)))
            features.append(text.features[start:stop])
        return answers, features

    def keep(self, counts: Sequence[int], texts: Sequence[int]) -> None:
        """Go on behind the leading `counts` tokens of each block, with these texts only."""
        self._lengths = [self._lengths[text] + counts[text] for text in texts]
        self._texts = [self._texts[text] for text in texts]
