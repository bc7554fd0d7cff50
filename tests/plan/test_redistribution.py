"""One rank's part in moving rows, against moving them one by one."""

import tracemalloc

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.redistribution import Redistribution, rows_moved
from megatron_splitkv.plan.row_source import RowSource
from tests.plan.layouts import random_plan

SIZES = [1, 2, 3, 4, 7]


def random_source(seed, length, cp_size, *, padding=False):
    """Ranges of any order on any ranks, perhaps with rows between them that are no context."""
    rng = np.random.default_rng(seed)
    cuts = np.concatenate([[0], np.sort(rng.integers(0, length + 1, 9)), [length]])
    order = rng.permutation(cuts.size - 1)
    start, end = cuts[:-1][order], cuts[1:][order]
    if padding:
        start, end = np.append(start, [-3, -1, -2]), np.append(end, [0, 0, 0])
        shuffle = rng.permutation(start.size)
        start, end = start[shuffle], end[shuffle]
    owner = np.sort(rng.integers(0, cp_size, start.size))
    return RowSource(start, end, owner, cp_size)


def move_by_hand(tensors, parts):
    """What an all-to-all-v makes of the ranks' tensors, in lists."""
    arrived = []
    for rank, part in enumerate(parts):
        new = [None] * part.num_new
        for old, at in zip(part.kept_old, part.kept_new, strict=True):
            new[at] = tensors[rank][old]
        received = []
        for sender, other in enumerate(parts):
            first = int(other.sent_rows[:rank].sum())
            index = other.sent_index[first : first + int(other.sent_rows[rank])]
            assert index.size == part.received_rows[sender]
            received += [tensors[sender][old] for old in index]
        for at, row in zip(part.received_index, received, strict=True):
            new[at] = row
        arrived.append(new)
    return arrived


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_every_row_comes_to_its_owner_and_back(seed, cp_size, padding):
    plan = random_plan(seed, cp_size)
    source = random_source(seed, plan.context_length, cp_size, padding=padding)
    parts = [Redistribution.of(plan, source, rank) for rank in range(cp_size)]
    old = [source.rows(rank).tolist() for rank in range(cp_size)]
    new = move_by_hand(old, parts)
    assert new == [plan.rows(rank).tolist() for rank in range(cp_size)]
    assert all(part.fills for part in parts)
    back = move_by_hand(new, [part.reverse() for part in parts])
    assert back == [[row if row >= 0 else None for row in rows] for rows in old]
    if cp_size > 1 and padding:
        assert not all(part.reverse().fills for part in parts)

    owner = np.empty(plan.context_length, dtype=np.int64)
    for rank in range(cp_size):
        owner[plan.rows(rank)] = rank
    changes = sum(
        int((owner[[r for r in rows if r >= 0]] != p).sum()) for p, rows in enumerate(old)
    )
    assert rows_moved(plan, source) == changes == sum(part.sent_index.size for part in parts)
    assert all(part.sent_rows[rank] == 0 for rank, part in enumerate(parts))  # nothing to itself


def test_a_plan_that_is_the_source_moves_nothing():
    layout = BlockLayout([50], [0], [True], 4)
    for strategy, source in (
        ("none", RowSource.contiguous(64, 4)),
        ("zigzag", RowSource.zigzag(64, 4)),
    ):
        plan = build_plan(layout, 64, 4, strategy=strategy)
        assert rows_moved(plan, source) == 0
        part = Redistribution.of(plan, source, 1)
        assert part.sent_index.size == part.received_index.size == 0
    # Zigzag parts from contiguous ones: ranks 0 and 3 keep one chunk of two, 1 and 2 likewise.
    assert (
        rows_moved(build_plan(layout, 64, 4, strategy="zigzag"), RowSource.contiguous(64, 4)) == 48
    )


def test_rows_leave_by_rank_and_then_by_position():
    layout = BlockLayout([7, 0], [0, 0], [True, False], 1)
    plan = ContextPlan(layout, [0, 2, 4, 6, 8], [1, 0, 1, 0], 2, "none")
    part = Redistribution.of(plan, RowSource.zigzag(8, 2), 0)  # holds 0, 1, 6, 7; gets 2, 3, 6, 7
    assert part.sent_index.tolist() == [0, 1]
    assert part.sent_rows.tolist() == [0, 2]
    assert part.received_rows.tolist() == [0, 2]
    assert part.received_index.tolist() == [0, 1]
    assert part.kept_old.tolist() == part.kept_new.tolist() == [2, 3]


def test_the_cost_is_that_of_the_pieces():
    """A context of 2^40 rows: nothing of that length may be made on the way."""
    length = 1 << 40
    plan = build_plan(BlockLayout([length - 1], [0], [True], 4), length, 8, chunks_per_rank=16)
    source = RowSource.zigzag(length, 8)
    tracemalloc.start()
    moved = rows_moved(plan, source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < moved < length
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("length", "cp_size", "message"),
    [
        (48, 4, "the plan covers 64 context rows, the source holds 48; build the plan with"),
        (64, 2, "the plan is for 4 context-parallel ranks, the rows lie on 2"),
    ],
)
def test_a_source_of_another_context_is_refused(length, cp_size, message):
    plan = build_plan(BlockLayout([5], [0], [True], 4), 64, 4)
    source = RowSource.zigzag(length, cp_size)
    with pytest.raises(ConfigError, match=message):
        rows_moved(plan, source)
    with pytest.raises(ConfigError, match=message):
        Redistribution.of(plan, source, 0)
