"""Prompt lookup."""

from collections.abc import Sequence

import pytest
import torch

from megatron_splitkv.evaluate.drafters import NGramDrafter


def propose(tokens: Sequence[int], count: int) -> list[int]:
    return NGramDrafter().propose([tokens], [torch.empty(0)], [count])[0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2, 3]),
        ([1, 2, 5, 0, 2, 6, 0, 1, 2], [5, 0, 2, 6]),  # the longer ending wins over the later
        ([2, 5, 0, 2, 6, 0, 3, 2], [6, 0, 3, 2]),  # of equal endings the later one
        ([7, 7], [7, 7, 7, 7]),
        ([4, 1, 2, 1, 2], [1, 2, 1, 2]),  # a copy that reaches the end goes on with itself
        ([1, 2, 3], []),
        ([1], []),
        # Five tokens end alike at 8, four at 9: more than four are not looked at.
        ([5, 1, 2, 3, 4, 8, 6, 1, 2, 3, 4, 9, 5, 1, 2, 3, 4], [9, 5, 1, 2]),
    ],
)
def test_proposals(tokens: list[int], expected: list[int]) -> None:
    assert propose(tokens, 4) == expected


def test_equals_a_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        length = int(torch.randint(1, 30, (), generator=generator))
        tokens = torch.randint(4, (length,), generator=generator).tolist()
        assert propose(tokens, 5) == plain_search(tokens, 5)


def plain_search(tokens: list[int], count: int) -> list[int]:
    for size in (4, 3, 2, 1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):  # the copy reads what it wrote
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []
