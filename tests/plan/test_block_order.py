"""Draft blocks dealt out by what they see: who owns which, and what does not change for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.block_order import mirrored_order
from megatron_splitkv.plan.pair_work import PairWork, pairs_by_owner
from tests.plan.layouts import layout_of, papers_layout, random_layout, uneven_layout

STRATEGIES = tuple(name for name in PLAN_STRATEGIES if name != "hypergraph")


def test_blocks_go_to_and_fro_by_hand():
    # Seen: 1 5 9 of the first document, 2 3 and padding of the second.
    layout, _ = layout_of([(10, [1, 5, 9], 0), (6, [2, 3], 1)], block_size=2)
    # Most first: 2 and 1; 4 and 3 back; 0 and padding.
    assert mirrored_order(layout, 2).tolist() == [0, 2, 3, 1, 4, 5]
    assert mirrored_order(layout, 3).tolist() == [2, 5, 0, 1, 3, 4]
    plan = build_plan(layout, 16, 2, block_order="mirrored")
    assert plan.layout.anchor_positions.tolist() == [1, 9, 12, 5, 13, 10]
    assert plan.layout.block_keep_mask.tolist() == [True] * 5 + [False]
    assert plan.blocks(1).tolist() == [3, 4, 5]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_ranks_differ_by_one_block_at_most(seed, cp_size):
    layout, length = random_layout(seed)
    plan = build_plan(layout, length, cp_size, block_order="mirrored")
    seen = np.where(
        plan.layout.block_keep_mask,
        plan.layout.anchor_positions - plan.layout.document_starts,
        0,
    )
    by_rank = seen.reshape(cp_size, -1).sum(axis=1)
    assert np.ptp(by_rank) <= seen.max(initial=0)
    work = pairs_by_owner(plan).sum(axis=1)
    own = plan.block_size**2
    assert np.ptp(work) <= plan.block_size * seen.max(initial=0) + own


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(STRATEGIES))
def test_all_blocks_are_owned_once_and_rows_as_ever(seed, cp_size, strategy):
    layout, length = random_layout(seed)
    plain = build_plan(layout, length, cp_size, strategy=strategy)
    plan = build_plan(layout, length, cp_size, strategy=strategy, block_order="mirrored")

    def blocks(plan):
        of = plan.layout
        return sorted(zip(of.document_starts, of.anchor_positions, of.block_keep_mask, strict=True))

    assert blocks(plan) == blocks(plain)
    for rank in range(cp_size):
        own = plan.blocks(rank)
        assert own.tolist() == sorted(own)
        assert own.size == plan.blocks_per_rank
        starts, kept = plan.layout.document_starts[own], plan.layout.block_keep_mask[own]
        anchors = plan.layout.anchor_positions[own]
        assert (np.diff(starts[kept]) >= 0).all()
        same = np.diff(starts[kept]) == 0
        assert (np.diff(anchors[kept])[same] >= 0).all()
    assert plan.context_work.sum() == plain.context_work.sum()
    assert plan.work.sum() == plain.work.sum()
    assert sum(plan.num_rows(rank) for rank in range(cp_size)) == length
    if strategy in ("none", "zigzag", "lpt"):  # which do not look at blocks' owners
        np.testing.assert_array_equal(plan.chunk_owner, plain.chunk_owner)


@pytest.mark.parametrize("cp_size", [4, 5, 8])
def test_ranks_that_wait_for_owners_of_queries_no_longer_do(cp_size):
    for layout, length in (
        papers_layout(0, documents=1),
        papers_layout(0),
        uneven_layout(0),
    ):
        even, plain = (
            PairWork.of_plan(build_plan(layout, length, cp_size, block_order=order))
            for order in ("mirrored", "contiguous")
        )
        mean = even.total / cp_size
        assert even.total == plain.total
        assert even.query_owners < 1.005 * mean
        assert even.query_owners < plain.query_owners
        for name in ("hops", "query_turns", "key_turns"):
            assert getattr(even, name) < 1.15 * mean, name
            assert getattr(even, name) <= getattr(plain, name), name


def test_the_order_travels_and_is_part_of_the_digest():
    layout, length = layout_of([(64, [3, 9, 20, 44], 0)], block_size=4)
    plan = build_plan(layout, length, 2, block_order="mirrored")
    again = ContextPlan.from_arrays(plan.to_arrays())
    assert again.block_order == "mirrored"
    assert again.digest == plan.digest
    assert build_plan(layout, length, 2).block_order == "contiguous"
    assert build_plan(layout, length, 2).digest != plan.digest
    renamed = plan.to_arrays() | {"block_order": np.frombuffer(b"contiguous", dtype=np.uint8)}
    assert ContextPlan.from_arrays(renamed).digest != plan.digest
    assert build_plan(layout, length, 2, strategy="balanced-local", block_order="mirrored").blocks(
        0
    ).tolist() == [0, 1]


def test_an_unknown_order_is_named():
    layout, length = layout_of([(64, [3, 9], 0)], block_size=4)
    with pytest.raises(ConfigError, match="block order 'zigzag' is not known; choose one of: cont"):
        build_plan(layout, length, 2, block_order="zigzag")
    arrays = build_plan(layout, length, 2).to_arrays()
    del arrays["block_order"]
    with pytest.raises(ConfigError, match="lack 'block_order'"):
        ContextPlan.from_arrays(arrays)
