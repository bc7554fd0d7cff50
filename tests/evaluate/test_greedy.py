"""Greedy decoding, and when a decoded text counts as equal to it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_splitkv.evaluate.cached_target import target_texts
from megatron_splitkv.evaluate.greedy import GreedyText, compare_with_greedy
from tests.evaluate.models import EOS, decode_greedily, prompts, tiny_target

TAPS = (0, 2, 3)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
def test_cached_decoding_equals_whole_passes(kind: str) -> None:
    model = tiny_target(kind)
    with target_texts(model, TAPS) as new_text:
        for prompt in prompts(2):
            (text,) = decode_greedily(new_text(), [prompt], max_new_tokens=25)
            with torch.inference_mode():
                whole = model(input_ids=torch.tensor([text.tokens[:-1]]), output_hidden_states=True)
            choices = whole.logits[0, len(prompt) - 1 :]
            assert text.new_tokens == choices.argmax(dim=-1).tolist()
            best = choices.topk(2).values
            torch.testing.assert_close(torch.tensor(text.gaps), best[:, 0] - best[:, 1])
            features = torch.cat([whole.hidden_states[i + 1][0] for i in TAPS], dim=-1)
            torch.testing.assert_close(text.features, features, rtol=1e-4, atol=1e-5)


def test_stops_at_a_stop_token() -> None:
    model = tiny_target()
    prompt = prompts(1)[0]
    with target_texts(model, TAPS) as new_text:
        (whole,) = decode_greedily(new_text(), [prompt], max_new_tokens=25)
        stop = {whole.new_tokens[7], EOS}
        (text,) = decode_greedily(new_text(), [prompt], max_new_tokens=25, stop_token_ids=stop)
    first = whole.new_tokens.index(whole.new_tokens[7])
    assert text.new_tokens == whole.new_tokens[: first + 1]
    assert len(text.features) == len(text.tokens) - 1


class Wavering:
    """Prefers token ``t + 1`` after ``t``, token ``t + 2`` nearly as much at one position."""

    def __init__(self, position: int, gap: float) -> None:
        self.position, self.gap = position, gap

    def read(self, prompt: Sequence[int]) -> tuple[torch.Tensor, None]:
        self.start = len(prompt)
        return self.logits(prompt, 0)[-1], None

    def forward(self, blocks: Sequence[Sequence[int]]) -> tuple[torch.Tensor, None]:
        return self.logits(blocks[0], self.start)[None], None

    def logits(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        logits = torch.zeros(len(tokens), 40)
        for row, token in enumerate(tokens):
            logits[row, token + 1] = 5.0
            if start + row == self.position:
                logits[row, token + 2] = 5.0 - self.gap
        return logits


def reference(gap: float) -> GreedyText:
    gaps = [5.0, 5.0, gap, 5.0, 5.0]
    return GreedyText([1, 2], [3, 4, 5, 6, 7], gaps, torch.empty(6, 1))


def compare(new_tokens: list[int], gap: float) -> Any:
    target: Any = Wavering(position=3, gap=gap)
    return compare_with_greedy(new_tokens, reference(gap), target)


def test_a_near_tie_is_no_mismatch_and_is_counted() -> None:
    found = compare([3, 4, 6, 7, 8], gap=5e-5)
    assert found.equal
    assert found.near_ties == 1


def test_a_wider_gap_is_a_mismatch() -> None:
    found = compare([3, 4, 6, 7, 8], gap=3e-4)
    assert not found.equal
    assert found.position == 2
    assert found.gap == pytest.approx(3e-4)


def test_after_a_near_tie_the_text_is_held_against_its_own_continuation() -> None:
    found = compare([3, 4, 6, 7, 9], gap=5e-5)
    assert not found.equal
    assert found.position == 4
    assert found.gap == pytest.approx(5.0)


def test_a_near_tie_in_a_text_of_one_token() -> None:
    target: Any = Wavering(position=1, gap=5e-5)
    greedy = GreedyText([1, 2], [3], [5e-5], torch.empty(2, 1))
    found = compare_with_greedy([4], greedy, target)
    assert found.equal
    assert found.near_ties == 1


def test_equal_and_truncated_texts() -> None:
    assert compare([3, 4, 5, 6, 7], gap=5e-5).near_ties == 0
    found = compare([3, 4, 5], gap=1.0)
    assert not found.equal
    assert found.position == 3
