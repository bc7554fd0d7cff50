"""`RowPlan`: visibility of any rows over any layout, against a mask made row by row."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.cpu import cpu_mode
from megatron_splitkv.plan import LeafLimits, RowPlan, even_positions, zigzag_positions
from megatron_splitkv.plan.staircase import DEFAULT_LEAF_LIMITS
from tests.plan.test_staircase import LIMITS, NO_LEAVES, count_coverage

DOCUMENTS = [0, 7, 7, 20, 21, 48]  # one is empty, one has one row


def in_plan_order(plan, rank, seen):
    """Rows and keys of a mask over tensors in the order that attention wants."""
    per_rank = plan.blocks_per_rank
    rows = []
    for r in range(plan.cp_size):
        order = plan.query_order(r)
        order = np.arange(per_rank) if order is None else order
        rows.append(r * per_rank + order)
    keys = plan.key_order(rank)
    seen = seen[np.concatenate(rows)]
    return seen if keys is None else seen[:, keys]


def assert_shows(plan, masks, limits=DEFAULT_LEAF_LIMITS, window=None):
    """The staircases of all ranks compute exactly these pairs.

    `masks[rank]` says which keys of the rank, in the order of its tensor, each row sees.
    """
    for rank, seen in enumerate(masks):
        staircase = plan.staircase(rank, limits, window=window)
        wanted = in_plan_order(plan, rank, seen)
        np.testing.assert_array_equal(count_coverage(staircase, plan.num_rows(rank)), wanted)
        assert staircase.needed_pairs == seen.sum() <= staircase.executed_pairs
        for level in staircase.levels:
            assert (level.q_end[:-1] <= level.q_start[1:]).all()
            assert (level.k_end[:-1] <= level.k_start[1:]).all()


def causal_masks(positions, cu_seqlens, *, lengths=None, window=None):
    """Per rank: rows of all ranks x the rank's keys."""
    bounds = np.asarray(cu_seqlens)
    lengths = np.diff(bounds) if lengths is None else np.asarray(lengths)

    def sees(query, key):
        document = np.searchsorted(bounds, query, side="right") - 1
        same = bounds[document] <= key < bounds[document + 1]
        real = query - bounds[document] < lengths[document]
        near = window is None or query - key < window
        return same and real and near and key <= query

    rows = np.concatenate(list(positions))
    return [np.array([[sees(q, k) for k in keys] for q in rows]) for keys in positions]


def shuffled(num_rows, cp_size, seed=0):
    rows = np.random.default_rng(seed).permutation(num_rows)
    return rows.reshape(cp_size, -1)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_causal_in_any_order(cp_size, limits):
    length = 48
    for positions in (
        zigzag_positions([0, length], cp_size),
        even_positions(1, length // cp_size, cp_size),
        even_positions(1, length // cp_size, cp_size)[::-1, ::-1],
        shuffled(length, cp_size),
    ):
        plan = RowPlan.of_causal(positions)
        assert_shows(plan, causal_masks(positions, [0, length]), limits)
        assert plan.build_own_staircase(0, None) is None


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_packed_documents_in_any_order(cp_size):
    for positions in (even_positions(1, 48 // cp_size, cp_size), shuffled(48, cp_size, 1)):
        plan = RowPlan.of_causal(positions, DOCUMENTS)
        assert_shows(plan, causal_masks(positions, DOCUMENTS))


@pytest.mark.parametrize("window", [1, 2, 5, 100])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_windows(cp_size, window):
    for positions in (zigzag_positions([0, 16, 48], cp_size), shuffled(48, cp_size, 2)):
        plan = RowPlan.of_causal(positions, [0, 16, 48])
        masks = causal_masks(positions, [0, 16, 48], window=window)
        for limits in (NO_LEAVES, LeafLimits()):
            assert_shows(plan, masks, limits, window)


def test_windows_of_long_documents_waste_little():
    positions = zigzag_positions([0, 4096], 2)
    plan = RowPlan.of_causal(positions)
    for rank in range(2):
        staircase = plan.staircase(rank, window=512)
        assert staircase.executed_pairs <= 1.10 * staircase.needed_pairs


@pytest.mark.parametrize("cp_size", [1, 2])
def test_padding_at_the_end_of_documents_sees_nothing_and_is_not_seen(cp_size):
    bounds, lengths = [0, 8, 16, 16, 28], [5, 8, 0, 1]
    for positions in (zigzag_positions(bounds, cp_size), shuffled(28, cp_size, 3)):
        plan = RowPlan.of_causal(positions, bounds, lengths=lengths)
        masks = causal_masks(positions, bounds, lengths=lengths)
        assert_shows(plan, masks)
        assert sum(mask.sum() for mask in masks) == sum(n * (n + 1) // 2 for n in lengths)


def document_masks(query_positions, key_positions, query_bounds, key_bounds, lengths_q, lengths_kv):
    def sees(query, key):
        qd = np.searchsorted(query_bounds, query, side="right") - 1
        kd = np.searchsorted(key_bounds, key, side="right") - 1
        real = query - query_bounds[qd] < lengths_q[qd]
        return qd == kd and real and key - key_bounds[kd] < lengths_kv[kd]

    rows = np.concatenate(list(query_positions))
    return [np.array([[sees(q, k) for k in keys] for q in rows]) for keys in key_positions]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_documents_see_all_their_keys(cp_size):
    query_bounds, key_bounds = np.array([0, 6, 12, 12]), np.array([0, 18, 18, 36])
    for lengths_q, lengths_kv in ((None, None), ([4, 6, 0], [17, 0, 3])):
        queries, keys = shuffled(12, cp_size), shuffled(36, cp_size, 1)
        plan = RowPlan.of_documents(
            queries, keys, query_bounds, key_bounds, lengths_q=lengths_q, lengths_kv=lengths_kv
        )
        real = (
            np.diff(query_bounds) if lengths_q is None else lengths_q,
            np.diff(key_bounds) if lengths_kv is None else lengths_kv,
        )
        assert_shows(plan, document_masks(queries, keys, query_bounds, key_bounds, *real))


def test_attention_without_a_mask_is_one_rectangle():
    plan = RowPlan.of_documents(
        even_positions(1, 3, 4), even_positions(1, 50, 4), [0, 12], [0, 200]
    )
    staircase = plan.staircase(2, NO_LEAVES)
    assert [len(level) for level in staircase.levels] == [1]
    assert staircase.executed_pairs == staircase.needed_pairs == 12 * 50


@pytest.mark.parametrize("positions", ["zigzag", "shuffled"])
def test_a_rank_has_at_most_as_many_staircases_as_there_are_ranks(positions):
    """A level of one causal document holds one rectangle per pass at its first step."""
    cp_size, length = 8, 4096
    rows = zigzag_positions([0, length], 8) if positions == "zigzag" else shuffled(length, 8)
    plan = RowPlan.of_causal(rows)
    depth = int(np.log2(length / cp_size)) + 1
    for rank in (0, 5):
        staircase = plan.staircase(rank)
        assert len(staircase.levels) <= cp_size * depth
        assert staircase.executed_pairs <= 1.25 * staircase.needed_pairs


def test_ranges_of_any_kind():
    """Hand-made ranges whose starts differ without being documents."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        start = np.sort(rng.integers(0, 30, 12))
        end = np.minimum(start + rng.integers(0, 9, 12), 30)
        keys = tuple(np.sort(part) for part in np.array_split(rng.permutation(30), 3))
        plan = RowPlan(start, end, keys)
        masks = [(start[:, None] <= k) & (k < end[:, None]) for k in keys]
        assert_shows(plan, masks)


def test_orders_are_named_only_where_rows_must_move():
    assert all(
        RowPlan.of_causal(zigzag_positions([0, 8, 24], 2)).query_order(rank) is None
        for rank in range(2)
    )
    plan = RowPlan.of_causal([[0, 1, 2], [5, 3, 4]])
    assert plan.query_order(0) is None
    assert plan.key_order(0) is None
    np.testing.assert_array_equal(plan.query_order(1), [1, 2, 0])
    np.testing.assert_array_equal(plan.key_order(1), [1, 2, 0])


@pytest.mark.parametrize("window", [None, 3])
def test_needs_are_what_the_staircases_show(window):
    for seed in range(5):
        positions = shuffled(24, 3, seed)
        plan = RowPlan.of_causal(positions, [0, 4, 24])
        needs = plan.needs(window)
        for rank in range(3):
            start, end = plan.key_ranges(rank, window)
            np.testing.assert_array_equal(needs[rank], start < end)


def test_group_cast_of_rows_covers_what_is_needed():
    plan = RowPlan.of_causal(even_positions(1, 6, 4), [0, 6, 12, 18, 24])  # a document a rank
    assert plan.resolve_cast("auto") == "group"
    np.testing.assert_array_equal(plan.query_cast(2, "group").blocks, np.arange(12, 18))
    assert plan.staircase(2, cast="group").num_rows == 6


# Keys that only their rank knows to be hidden


def test_hidden_keys_leave_the_visible_stretch():
    plan = RowPlan.of_documents(
        even_positions(2, 2, 2), even_positions(2, 3, 2), [0, 4, 8], [0, 6, 12]
    )
    hidden = np.array([0, 0, 1, 1, 1, 1], dtype=bool)  # all of the second sample
    masked = plan.with_hidden(1, hidden)
    masks = document_masks(
        even_positions(2, 2, 2), even_positions(2, 3, 2), [0, 4, 8], [0, 6, 12], [4, 4], [6, 6]
    )
    masks[1] = masks[1] & ~hidden
    assert_shows(masked, masks)
    # What travels is the same whether or not a rank knows it.
    np.testing.assert_array_equal(masked.needs(), plan.needs())


def test_hidden_keys_of_shuffled_causal_rows():
    positions = shuffled(24, 2, 5)
    plan = RowPlan.of_causal(positions)
    masks = causal_masks(positions, [0, 24])
    for rank in range(2):
        hidden = positions[rank] >= 17
        plan = plan.with_hidden(rank, hidden)
        masks[rank] = masks[rank] & ~hidden
    assert_shows(plan, masks)


def test_hidden_keys_at_the_beginning():
    plan = RowPlan.of_causal([[0, 1, 2, 3]]).with_hidden(0, [True, True, False, False])
    mask = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=bool)
    assert_shows(plan, [mask])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RowPlan.of_causal([0, 1]), "give a line of equally many rows for each rank"),
        (lambda: RowPlan.of_causal([[0, 1], [2, 2]]), "key 2 is held twice"),
        (lambda: RowPlan.of_causal([[0, 1], [2, 4]]), "positions run from 0 to 4, the documents"),
        (lambda: RowPlan.of_causal([[0, 1]], [1, 2]), "cu_seqlens must be a vector that ascends"),
        (lambda: RowPlan.of_causal([[0, 1]], [0, 2], lengths=[3]), "one number for each"),
        (
            lambda: RowPlan.of_documents([[0], [1]], [[0], [1]], [0, 2], [0, 1, 2]),
            "1 documents of queries and 2 of keys",
        ),
        (
            lambda: RowPlan(np.zeros(3), np.ones(3), (np.arange(2), np.arange(2) + 2)),
            "3 query rows do not divide among 2 ranks",
        ),
        (lambda: RowPlan(np.ones(2), np.zeros(2), (np.arange(2),)), "key_start <= key_end"),
        (lambda: zigzag_positions([0, 8, 14], 2), "document 1 has 6 rows, no multiple of 4"),
        (
            lambda: RowPlan.of_causal([[0, 1]]).with_hidden(0, [True]),
            "rank 0 holds 2 keys, `hidden` names 1",
        ),
        (
            lambda: RowPlan.of_causal([[0, 1]]).with_hidden(5, [True, False]),
            "rank 5 is not in [0, 1) of this plan",
        ),
        (
            lambda: RowPlan.of_documents([[0]], [[0]], [0, 1], [0, 1]).staircase(0, window=3),
            "window 3: only causal rows have a window",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build()


# Megatron's own orders


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_is_megatrons(cp_size):
    torch = pytest.importorskip("torch")
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    for rank in range(cp_size):
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda rank=rank: rank)
        with cpu_mode():
            mine = get_pos_emb_on_this_cp_rank(torch.arange(24), 0, group)
        np.testing.assert_array_equal(zigzag_positions([0, 24], cp_size)[rank], mine)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_of_documents_is_that_of_megatrons_packed_rope(cp_size):
    torch = pytest.importorskip("torch")
    from megatron.core.models.common.embeddings import rope_utils

    bounds = np.array([0, 24, 24, 72, 96])
    for rank in range(cp_size):
        expected = torch.cat(
            [
                rope_utils._get_thd_freqs_on_this_cp_rank(
                    rank, cp_size, torch.empty((b - a) // cp_size), torch.arange(96), int(a)
                )
                for a, b in itertools.pairwise(bounds)
            ]
        )
        np.testing.assert_array_equal(zigzag_positions(bounds, cp_size)[rank], expected)
