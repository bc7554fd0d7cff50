import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.redistribution import rows_moved
from megatron_splitkv.plan.row_source import RowSource
from tests.plan.layouts import fig5_layout, layout_of, random_layout, random_plan, visible

RANKS = [1, 2, 3, 5, 8]


def rows_naive(plan, rank):
    return [
        row
        for row in range(plan.context_length)
        if plan.chunk_owner[np.searchsorted(plan.chunk_bounds, row, side="right") - 1] == rank
    ]


@pytest.mark.parametrize("cp_size", RANKS)
@pytest.mark.parametrize("seed", range(12))
def test_rows_and_key_ranges_equal_naive(seed, cp_size):
    plan = random_plan(seed, cp_size)
    for rank in range(cp_size):
        rows = plan.rows(rank)
        assert rows.dtype == np.int64
        assert rows.tolist() == rows_naive(plan, rank)
        assert plan.num_rows(rank) == rows.size

        ranges = plan.row_ranges(rank)
        assert ranges.shape == (len(ranges), 2)
        assert (ranges[:, 0] < ranges[:, 1]).all()
        assert (ranges[1:, 0] > ranges[:-1, 1]).all()
        np.testing.assert_array_equal(
            np.concatenate([np.arange(*r) for r in ranges] or [rows]), rows
        )

        start, end = plan.key_ranges(rank)
        local = np.arange(rows.size)
        seen = (start[:, None] <= local) & (local < end[:, None])
        np.testing.assert_array_equal(seen, visible(plan.layout, rows))
        padding = ~plan.layout.block_keep_mask
        assert not start[padding].any()
        assert not end[padding].any()


@pytest.mark.parametrize("cp_size", RANKS)
@pytest.mark.parametrize("seed", range(6))
def test_work_equals_naive(seed, cp_size):
    plan = random_plan(seed, cp_size)
    size = plan.layout.block_size
    for rank in range(cp_size):
        context = size * visible(plan.layout, plan.rows(rank)).sum()
        own = size**2 * plan.layout.block_keep_mask[plan.blocks(rank)].sum()
        assert plan.context_work[rank] == context
        assert plan.work[rank] == context + own
    if plan.work.sum():
        assert plan.imbalance == pytest.approx(plan.work.max() / plan.work.mean() - 1)


def test_windows_travel_and_are_part_of_the_digest():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4, windows=[None, 3, 3])
    assert plan.windows == (None, 3, 3)
    assert plan.to_arrays()["windows"].tolist() == [0, 3, 3]
    assert ContextPlan.from_arrays(plan.to_arrays()).windows == (None, 3, 3)
    others = [
        ContextPlan(layout, plan.chunk_bounds, plan.chunk_owner, 4, "balanced", windows)
        for windows in ((None,), (None, 3), (None, 3, 4), (3, None, 3))
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 5
    full, short = others[0], ContextPlan(layout, [0, length], [0], 4, "none", (3,))
    assert full.windows == build_plan(layout, length, 4).windows
    assert short.work.tolist() == [
        short.staircase(0, window=3).needed_pairs + 2 * 3,
        *(plan.own_staircase(rank, 3).needed_pairs for rank in (1, 2, 3)),
    ]


def test_a_priced_plan_prices_as_any_other():
    layout, length = random_layout(2, max_length=900)
    for options in ({}, {"windows": (None, 9)}, {"tiles": True}, {"strategy": "lpt"}):
        plan = build_plan(layout, length, 3, **options)
        again = ContextPlan.from_arrays(plan.to_arrays())
        assert plan.chunk_work.tolist() == again.chunk_work.tolist()
        assert plan.work.tolist() == again.work.tolist()


def test_bundles_go_where_their_rows_are():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4, chunks_per_rank=3)
    source = RowSource.contiguous(length, 4)
    matched = build_plan(layout, length, 4, chunks_per_rank=3, source=source)
    assert sorted(matched.work.tolist()) == sorted(plan.work.tolist())
    assert rows_moved(matched, source) < rows_moved(plan, source)


def test_no_work_is_balanced():
    layout, length = layout_of([(8, [], 3)], block_size=4)
    plan = build_plan(layout, length, 4)
    assert plan.work.tolist() == [0, 0, 0, 0]
    assert plan.imbalance == 0.0


def test_context_and_layout_may_be_empty():
    plan = build_plan(BlockLayout([], [], [], 4), 0, 3)
    assert [plan.num_rows(rank) for rank in range(3)] == [0, 0, 0]
    assert plan.blocks(2).size == plan.rows(2).size == 0
    assert plan.row_ranges(0).shape == (0, 2)
    assert len(plan.staircase(1).levels) == 0


def test_own_blocks_count_only_where_they_are_kept():
    layout, length = layout_of([(8, [2, 4], 2)], block_size=4)
    plan = build_plan(layout, length, 2)
    assert (plan.work - plan.context_work).tolist() == [2 * 16, 0]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 7, 64])
def test_padding_leaves_the_kept_blocks_alone(cp_size):
    layout, length = random_layout(7)
    padded = build_plan(layout, length, cp_size).layout
    n = layout.num_blocks
    assert padded.num_blocks == n + -n % cp_size
    for name in ("anchor_positions", "document_starts", "block_keep_mask"):
        np.testing.assert_array_equal(getattr(padded, name)[:n], getattr(layout, name))
    assert not padded.block_keep_mask[n:].any()
    assert (padded.anchor_positions[n:] == layout.document_starts[-1]).all()
    assert (padded.document_starts[n:] == layout.document_starts[-1]).all()


def test_blocks_are_consecutive_so_that_a_gather_is_the_global_order():
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4)
    assert [plan.blocks(rank).tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_group(rank):
    layout, length = fig5_layout()
    plan = build_plan(layout, length, 4)
    for method in (plan.rows, plan.num_rows, plan.row_ranges, plan.blocks, plan.key_ranges):
        with pytest.raises(ConfigError, match=rf"rank {rank} is not in \[0, 4\)"):
            method(rank)


class _OnePlan(torch.utils.data.Dataset):
    def __init__(self, plan):
        self.plan = plan

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"plan": self.plan.to_arrays()}


@pytest.mark.parametrize("strategy", ["none", "zigzag", "lpt", "balanced"])
def test_survives_collation(strategy):
    layout, length = random_layout(3)
    plan = build_plan(layout, length, 3, strategy=strategy)
    (batch,) = DataLoader(_OnePlan(plan), batch_size=1)
    assert all(torch.is_tensor(value) for value in batch["plan"].values())
    again = ContextPlan.from_arrays(batch["plan"])
    assert again.digest == plan.digest
    assert (again.strategy, again.cp_size) == (strategy, 3)
    for rank in range(3):
        np.testing.assert_array_equal(again.rows(rank), plan.rows(rank))
    assert ContextPlan.from_arrays(plan.to_arrays()).digest == plan.digest
    assert pickle.loads(pickle.dumps(plan)).digest == plan.digest


def test_two_plans_in_a_batch_are_refused():
    layout, length = fig5_layout()
    arrays = build_plan(layout, length, 2).to_arrays()
    with pytest.raises(ConfigError, match="a batch holds one plan"):
        ContextPlan.from_arrays({k: np.stack([v, v]) for k, v in arrays.items()})
    del arrays["chunk_owner"]
    with pytest.raises(ConfigError, match="lack 'chunk_owner'"):
        ContextPlan.from_arrays(arrays)


def test_digest_tells_plans_apart():
    layout, length = fig5_layout()
    moved = layout.anchor_positions.copy()
    moved[0] += 1
    dropped = layout.block_keep_mask.copy()
    dropped[0] = False
    others = [
        build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=3),
        build_plan(layout, length, 4, strategy="zigzag"),
        build_plan(layout, length, 4, strategy="lpt", chunks_per_rank=2),
        build_plan(layout, length, 2, strategy="lpt", chunks_per_rank=6),
        build_plan(layout, length + 1, 4, strategy="lpt", chunks_per_rank=3),
        build_plan(layout, length, 4, strategy="none", chunks_per_rank=3),  # other owners alone
    ]
    for anchors, keep, size in (
        (moved, layout.block_keep_mask, 2),
        (layout.anchor_positions, dropped, 2),
        (layout.anchor_positions, layout.block_keep_mask, 3),
    ):
        changed = BlockLayout(anchors, layout.document_starts, keep, size)
        others.append(build_plan(changed, length, 4, strategy="lpt", chunks_per_rank=3))
    assert len({plan.digest for plan in others}) == len(others)


def test_a_plan_does_not_change_with_its_inputs():
    layout, length = fig5_layout()
    bounds, owner = np.array([0, 8, length]), np.array([0, 1])
    plan = ContextPlan(layout, bounds, owner, 2, "none")
    before = plan.rows(0).tolist()
    bounds[1], owner[:] = 4, 1
    assert plan.rows(0).tolist() == before
    with pytest.raises(FrozenInstanceError):
        plan.cp_size = 3


@pytest.mark.parametrize(
    ("bounds", "owner", "message"),
    [
        ([0, 24], [0, 1], "one entry more"),
        ([1, 24], [0], "ascend from 0"),
        ([0, 9, 8, 24], [0, 1, 0], "ascend from 0"),
        ([0, 24], [2], r"ranks in \[0, 2\)"),
    ],
)
def test_malformed_chunks(bounds, owner, message):
    layout, _ = fig5_layout()
    with pytest.raises(ConfigError, match=message):
        ContextPlan(layout, np.array(bounds), np.array(owner), 2, "none")


def test_blocks_that_do_not_divide_are_refused():
    layout, length = fig5_layout()
    with pytest.raises(ConfigError, match="8 blocks do not divide among 3 ranks"):
        ContextPlan(layout, np.array([0, length]), np.array([0]), 3, "none")
