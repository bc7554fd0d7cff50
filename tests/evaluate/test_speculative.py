"""The decoding loop on texts and drafters that are written down."""

from collections.abc import Sequence

import pytest
import torch

from megatron_splitkv.evaluate.greedy import GreedyText
from megatron_splitkv.evaluate.recorded_target import RecordedTarget
from megatron_splitkv.evaluate.speculative import DraftStep
from tests.evaluate.models import decode_speculatively

PROMPT_LENGTH = 6


def text_of(length: int, stop: int | None = None) -> GreedyText:
    """Token id = 100 + position; features say their position."""
    tokens = [100 + position for position in range(length)]
    if stop is not None:
        tokens = tokens[: tokens.index(stop) + 1]
    new = tokens[PROMPT_LENGTH:]
    features = torch.arange(len(tokens) - 1.0)[:, None]
    return GreedyText(tokens[:PROMPT_LENGTH], new, [1.0] * len(new), features)


class Scripted:
    """Proposes the true continuation, shifted by `shift`, right for the scripted lengths."""

    def __init__(self, rights: Sequence[int], shift: int = 0) -> None:
        self.rights, self.shift = list(rights), shift
        self.seen: list[float] = []
        self.counts: list[int] = []

    def join(self, max_length: int) -> None:
        self.max_length = max_length

    def keep(self, texts: Sequence[int]) -> None:
        pass

    def propose(
        self,
        texts: Sequence[Sequence[int]],
        features: Sequence[torch.Tensor],
        counts: Sequence[int],
    ) -> list[list[int]]:
        (tokens,), (count,) = texts, counts
        return [self.continuation(tokens, features[0], count)]

    def continuation(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        assert tokens == [100 + position for position in range(len(tokens))]
        self.seen += features[:, 0].tolist()
        assert self.seen == list(range(len(tokens) - 1)), "context is everything before the anchor"
        self.counts.append(count)
        right = self.rights.pop(0)
        anchor = len(tokens) - 1
        true = [100 + anchor + slot + self.shift for slot in range(1, count + 1)]
        return true[:right] + [0] * (count - right)


def decode(text: GreedyText, drafter: Scripted, block_size: int, **options: int) -> list[DraftStep]:
    stop = {options["stop"]} if "stop" in options else set()
    (found,) = decode_speculatively(
        RecordedTarget([text]),
        drafter,
        [text.prompt],
        num_proposals=block_size - 1,
        max_new_tokens=options.get("max_new_tokens", len(text.new_tokens)),
        stop_token_ids=stop,
    )
    assert found.new_tokens == text.new_tokens
    assert 1 + sum(step.produced for step in found.steps) == len(found.new_tokens)
    return found.steps


def test_counts_include_the_targets_own_token() -> None:
    steps = decode(text_of(20), Scripted([0, 3, 1, 2, 0, 0, 0]), block_size=4)
    assert [step.produced for step in steps] == [1, 4, 2, 3, 1, 1, 1]
    assert [step.accepted for step in steps] == [0, 3, 1, 2, 0, 0, 0]
    assert [step.proposed for step in steps] == [3, 3, 3, 3, 3, 2, 1]


def test_last_blocks_are_shorter_and_cut_at_the_longest_text() -> None:
    drafter = Scripted([3, 3, 3])
    steps = decode(text_of(16), drafter, block_size=4)  # 10 new tokens: 1 + 4 + 4 + 1
    assert [step.produced for step in steps] == [4, 4, 1]
    assert drafter.counts == [3, 3, 1]
    assert steps[-1] == DraftStep(proposed=1, accepted=1, produced=1)


def test_a_stop_token_ends_the_text_inside_a_block() -> None:
    drafter = Scripted([3, 3])
    steps = decode(text_of(30, stop=112), drafter, block_size=4, max_new_tokens=24, stop=112)
    assert [step.produced for step in steps] == [4, 2]
    assert steps[-1] == DraftStep(proposed=2, accepted=2, produced=2)
    # As the target's own token after the accepted ones.
    steps = decode(text_of(30, stop=110), Scripted([3]), 4, max_new_tokens=24, stop=110)
    assert steps == [DraftStep(proposed=3, accepted=3, produced=4)]
    # As the first token of all.
    assert decode(text_of(30, stop=106), Scripted([]), 4, max_new_tokens=24, stop=106) == []


def test_a7_slots_predict_their_own_position() -> None:
    """Token id = 100 + position: at anchor 6 of B = 4 the proposals stand for 107, 108, 109."""
    drafter = Scripted([3])
    steps = decode(text_of(11), drafter, block_size=4)
    assert drafter.counts == [3], "the proposal length is B - 1"
    assert steps == [DraftStep(proposed=3, accepted=3, produced=4)]


@pytest.mark.parametrize("shift", [1, -1])
def test_a7_shifted_slots_are_accepted_nowhere(shift: int) -> None:
    steps = decode(text_of(20), Scripted([3] * 20, shift=shift), block_size=4)
    assert {step.accepted for step in steps} == {0}


def test_fewer_proposals_than_slots() -> None:
    class Silent(Scripted):
        def continuation(
            self, tokens: Sequence[int], features: torch.Tensor, count: int
        ) -> list[int]:
            return []

    steps = decode(text_of(12), Silent([]), block_size=4)
    assert steps == [DraftStep(0, 0, 1)] * 5


def test_a_recorded_target_wants_its_own_prompt() -> None:
    with pytest.raises(ValueError, match="prompts of its texts"):
        RecordedTarget([text_of(12)]).join([1, 2])
