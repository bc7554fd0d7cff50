"""Expected pairs are the mean over all anchors; a document's cost is what its plan counts."""

import numpy as np
import pytest

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.pack_cost import PackCost, expected_pairs
from megatron_splitkv.plan import build_plan

B = 4


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9, 30, 1000])
def test_with_every_anchor_it_is_what_a_plan_counts(window: int | None) -> None:
    for length in (2, 3, 5, 9, 33):
        anchors = np.arange(length - 1)
        layout = BlockLayout(anchors, 0 * anchors, anchors >= 0, B)
        plan = build_plan(layout, length, 1, windows=(window,))
        counted = expected_pairs(np.array([length]), np.array([length - 1]), B, window)
        assert counted.tolist() == [int(plan.work.sum())]


def test_fewer_anchors_see_the_mean_rounded_down() -> None:
    # Anchors 0 to 4 see 2 keys on average, times 4 slots, and 16 pairs of their own.
    assert expected_pairs(np.array([6]), np.array([3]), B, None).tolist() == [3 * (4 * 2 + 16)]
    # Window 4: slots reach 3, 2, 1, 0 keys before the anchor: 9, 7, 4, 0 over all five places.
    own = 1 + 2 + 3 + 4
    assert expected_pairs(np.array([6]), np.array([2]), B, 4).tolist() == [2 * own + 2 * 20 // 5]
    assert expected_pairs(np.array([1]), np.array([0]), B, None).tolist() == [0]


def test_a_million_tokens_stay_in_64_bits() -> None:
    length, anchors = 1_000_001, 1_000_000
    pairs = expected_pairs(np.array([length]), np.array([anchors]), 16, None)
    assert pairs.tolist() == [anchors * (16 * (anchors - 1)) // 2 + anchors * 256]


def test_cost_of_documents_is_rows_and_pairs() -> None:
    cost = PackCost(
        context_row=5, draft_row=7, pair=11, block_size=B, num_anchors=3, windows=(None, 4, None)
    )
    pairs = 2 * 3 * (4 * 2 + 16) + 3 * 10 + 3 * 20 // 5
    one, six = cost.of_documents(np.array([1, 6])).tolist()
    assert six == 6 * 5 + 3 * B * 7 + pairs * 11
    assert one == 5  # no anchor: nothing but its context row
