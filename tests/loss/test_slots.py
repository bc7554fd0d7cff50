"""Slot weights and the report."""

import math

import torch

from megatron_splitkv.loss import drafter_report, loggable, slot_weights

B = 4


def test_a7_weights_of_the_slots() -> None:
    """Slot 0 is free, slot 1 counts fully, each further slot exp(-1 / gamma) less."""
    weights = slot_weights(torch.tensor([False, True, True, True]), B, gamma=2.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]))


def test_only_supervised_slots_weigh_and_never_slot_0() -> None:
    mask = torch.tensor([[True, False, True, False], [True] * 4])
    weights = slot_weights(mask.view(-1), B, gamma=math.inf).view(2, B)
    assert weights.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]


def report_of(right: list[list[int]], mask: list[list[int]], keep: list[int]) -> dict[str, list]:
    labels = torch.full((len(right) * B,), 7)
    predictions = torch.where(torch.tensor(right).view(-1) > 0, 7, 8)
    label_mask, keep_mask = torch.tensor(mask).view(-1).bool(), torch.tensor(keep).bool()
    report = drafter_report(predictions, labels, label_mask, keep_mask, B)
    return {name: pair.tolist() for name, pair in report.items()}


def test_acceptance_stops_at_the_first_wrong_slot() -> None:
    full = [0, 1, 1, 1]
    report = report_of([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 1, 1]], [full] * 3, [1, 1, 1])
    assert report["accept_len"] == [2 + 4 + 1, 3]
    assert report["slot_1_accuracy"] == [2, 3]
    assert report["slot_2_accuracy"] == [2, 3]
    assert report["slot_3_accuracy"] == [3, 3]


def test_an_unsupervised_slot_ends_the_count_and_is_no_error() -> None:
    report = report_of([[1, 1, 1, 1]], [[0, 1, 0, 1]], [1])
    assert report["accept_len"] == [2, 1]
    assert report["slot_2_accuracy"] == [0, 0]
    assert report["slot_3_accuracy"] == [1, 1]


def test_padding_blocks_count_nowhere() -> None:
    report = report_of([[1, 1, 1, 1], [1, 0, 0, 0]], [[0] * 4, [0, 1, 1, 1]], [0, 1])
    assert report["accept_len"] == [1, 1]
    assert report["slot_1_accuracy"] == [0, 1]


def test_an_empty_report_logs_zero_and_leaves_other_ranks_counts_alone() -> None:
    empty = loggable(
        drafter_report(
            *[torch.zeros(B, dtype=torch.long)] * 2, torch.zeros(B).bool(), torch.zeros(1).bool(), B
        )
    )
    for pair in empty.values():
        assert pair[0] / pair[1] == 0
        assert torch.equal(pair + torch.tensor([3.0, 5.0]), torch.tensor([3.0, 5.0]))
