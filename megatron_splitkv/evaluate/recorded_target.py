"""A target that already spoke: replays a greedy text, so that controls need no second decoding.

Greedy speculative decoding yields the same text whatever drafter proposes. So what a drafter would
have earned can be read off a recorded text: the target's answer to a block is the text itself, as
far as the block agrees with it, and nothing behind the first disagreement is looked at.
"""

from collections.abc import Sequence

import torch

from megatron_splitkv.evaluate.greedy import GreedyText

# What the target would say behind the recorded text is unknown and equals no proposal.
_UNKNOWN = -1


class RecordedTarget:
    """Stands in for a `CachedTarget` on the prompt of a recorded text.

    Args:
        text: what the target said.
    """

    def __init__(self, text: GreedyText) -> None:
        self._text = text
        self._tokens = text.tokens
        self._length = 0

    def prefill(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Return the recorded first token and the prompt's features."""
        if list(prompt) != self._text.prompt:
            raise ValueError("a recorded target can only be given the prompt of its text")
        self._length = len(prompt)
        return self._tokens[self._length], self._text.features[: self._length]

    def verify(self, block: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Return the recorded token after each position of the block, and features."""
        start, stop = self._length, self._length + len(block)
        self._length = stop
        answer = self._tokens[start + 1 : stop + 1]
        answer += [_UNKNOWN] * (len(block) - len(answer))
        return answer, self._text.features[start:stop]

    def crop(self, length: int) -> None:
        """Go back to position `length`."""
        self._length = length
