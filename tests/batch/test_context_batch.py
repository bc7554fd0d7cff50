import math

import numpy as np
import pytest
import torch

from megatron_splitkv.batch import get_batch_on_this_cp_rank, get_online_batch_on_this_cp_rank
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.loss.slots import slot_weights
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.row_source import RowSource

MASK_TOKEN = 9999
STRATEGIES = ("none", "zigzag", "lpt", "balanced")
PER_BLOCK = (
    "block_tokens",
    "block_positions",
    "block_real_tokens",
    "block_labels",
    "block_label_mask",
)


def make_pack(lengths, loss_mask=None):
    """Token ids are 100 + packed position."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(cu[-1], bool) if loss_mask is None else np.asarray(loss_mask, bool)
    return Pack(np.arange(len(lengths)), cu, 100 + np.arange(cu[-1]), mask)


class Reader:
    """Features equal to the packed position, and a record of the rows that were read."""

    def __init__(self, pack):
        self.limit, self.read = int(pack.cu_seqlens[-1]), []

    def __call__(self, row_ranges):
        assert row_ranges.dtype == np.int64
        assert row_ranges.shape[1] == 2
        rows = np.concatenate([np.arange(*r) for r in row_ranges] or [np.empty(0, int)])
        assert rows.size == 0 or rows.max() < self.limit
        self.read += rows.tolist()
        return torch.from_numpy(rows).float()[:, None].repeat(1, 3)


def batch_of(pack, plan, rank, reader=None, label_shift=0):
    reader = reader or Reader(pack)
    return get_batch_on_this_cp_rank(
        pack, plan, rank, reader, mask_token_id=MASK_TOKEN, label_shift=label_shift
    )


def layout_of(pack, block_size=4, num_anchors=3):
    return select_anchors(
        pack.loss_mask,
        pack.cu_seqlens,
        num_anchors=num_anchors,
        block_size=block_size,
        seed=3,
        step=0,
        sample_ids=pack.document_ids,
    )


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a7_slot_k_predicts_the_token_at_its_own_position(cp_size):
    pack = make_pack([16])
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, cp_size)
    batch = batch_of(pack, plan, 0)
    assert batch["block_tokens"].tolist() == [105] + [MASK_TOKEN] * 3
    assert batch["block_labels"].tolist()[1:] == [106, 107, 108]
    assert batch["block_positions"].tolist() == [5, 6, 7, 8]
    assert batch["block_label_mask"].tolist() == [False, True, True, True]
    if cp_size == 2:  # the second rank's only block is padding
        other = batch_of(pack, plan, 1)
        assert other["block_keep_mask"].tolist() == [False]
        assert other["block_tokens"].tolist() == [MASK_TOKEN] * 4
        assert other["block_labels"].tolist() == [0] * 4
        assert not other["block_label_mask"].any()


def test_shifted_labels_are_those_of_the_position_behind_and_slot_0_is_trained():
    loss_mask = np.ones(16, dtype=bool)
    loss_mask[8] = False
    pack = make_pack([9, 7], loss_mask)
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, 1)
    batch = batch_of(pack, plan, 0, label_shift=1)
    assert batch["block_tokens"].tolist() == [105] + [MASK_TOKEN] * 3
    assert batch["block_positions"].tolist() == [5, 6, 7, 8]
    assert batch["block_real_tokens"].tolist() == [105, 106, 107, 108]
    # Token 108 is not supervised, and the document has no token behind it.
    assert batch["block_labels"].tolist() == [106, 107, 108, 0]
    assert batch["block_label_mask"].tolist() == [True, True, False, False]
    weights = slot_weights(batch["block_label_mask"], 4, 2.0, first_slot=0)
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-0.5), 0.0, 0.0]))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a7_decay_weights(cp_size):
    pack = make_pack([16])
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, cp_size)
    mask = batch_of(pack, plan, 0)["block_label_mask"]
    weights = slot_weights(mask, 4, 2.0)
    expected = torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)])
    torch.testing.assert_close(weights.flatten().float(), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_a8_every_real_row_is_read_once(cp_size, strategy):
    pack = make_pack([7, 5, 2])
    plan = build_plan(layout_of(pack), 14, cp_size, strategy=strategy)
    reader, features, positions = Reader(pack), [], []
    for rank in range(cp_size):
        batch = batch_of(pack, plan, rank, reader)
        features += batch["context_features"][:, 0].tolist()
        positions += batch["context_positions"].tolist()
    assert sorted(reader.read) == sorted(features) == list(range(14))
    inside = [*range(7), *range(5), *range(2)]
    assert positions == [inside[int(row)] for row in features]


def test_a9_positions_are_those_of_the_document_wherever_a_chunk_lies():
    """Rows are ascending here, so chunks {3, 0} come as 0, 3: positions [0, 1], then [2, 3]."""
    pack = make_pack([4, 4])
    layout = BlockLayout([7], [4], [True], 4)
    moved = ContextPlan(
        BlockLayout([7, 4], [4, 4], [True, False], 4),
        np.array([0, 2, 4, 6, 8]),
        np.array([0, 1, 1, 0]),
        2,
        "lpt",
    )
    one = batch_of(pack, build_plan(layout, 8, 1), 0)
    assert one["context_positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    for plan in (moved, build_plan(layout, 8, 2, strategy="none", chunks_per_rank=2)):
        for rank in range(2):
            batch = batch_of(pack, plan, rank)
            expected = one["context_positions"][torch.from_numpy(plan.rows(rank))]
            assert batch["context_positions"].tolist() == expected.tolist()
            assert batch["context_positions"].max() < 4
    assert moved.rows(0).tolist() == [0, 1, 6, 7]
    assert batch_of(pack, moved, 0)["context_positions"].tolist() == [0, 1, 2, 3]
    assert batch_of(pack, moved, 0)["block_positions"].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [2, 3, 5])
def test_ranks_together_equal_one_rank(cp_size, strategy):
    rng = np.random.default_rng(0)
    lengths = [33, 0, 1, 2, 70, 41]
    pack = make_pack(lengths, rng.random(sum(lengths)) < 0.8)
    layout = layout_of(pack, num_anchors=4)
    one = batch_of(pack, build_plan(layout, 147, 1), 0)
    plan = build_plan(layout, 147, cp_size, strategy=strategy)
    parts = [batch_of(pack, plan, rank) for rank in range(cp_size)]

    n = layout.num_blocks
    for name in (*PER_BLOCK, "block_keep_mask"):
        together = torch.cat([part[name] for part in parts])
        assert together.dtype == one[name].dtype
        assert torch.equal(together[: one[name].numel()], one[name]), name
    padding = torch.cat([part["block_keep_mask"] for part in parts])[n:]
    assert padding.numel() == -n % cp_size
    assert not padding.any()

    rows = torch.cat([torch.from_numpy(plan.rows(rank)) for rank in range(cp_size)])
    for name in ("context_features", "context_positions"):
        together = torch.cat([part[name] for part in parts])
        assert torch.equal(together, one[name][rows]), name


@pytest.mark.parametrize("label_shift", [0, 1])
def test_labels_equal_the_definition_slot_by_slot(label_shift):
    rng = np.random.default_rng(1)
    lengths = [9, 30, 3, 25]
    pack = make_pack(lengths, rng.random(sum(lengths)) < 0.6)
    layout = layout_of(pack, block_size=6, num_anchors=5)
    batch = batch_of(pack, build_plan(layout, sum(lengths), 1), 0, label_shift=label_shift)
    for i in range(layout.num_blocks):
        start, anchor = layout.document_starts[i], layout.anchor_positions[i]
        end = start + lengths[list(pack.cu_seqlens[:-1]).index(start)]
        for slot in range(6):
            at, row = anchor + slot, 6 * i + slot
            kept, due = bool(layout.block_keep_mask[i]), at + label_shift
            assert batch["block_real_tokens"][row] == (
                pack.token_ids[at] if kept and at < end else 0
            )
            exists = kept and due < end
            assert batch["block_labels"][row] == (pack.token_ids[due] if exists else 0)
            trained = exists and due > anchor and bool(pack.loss_mask[due])
            assert bool(batch["block_label_mask"][row]) == trained
            assert batch["block_positions"][row] == at - start
            real = slot == 0 and kept
            assert batch["block_tokens"][row] == (pack.token_ids[at] if real else MASK_TOKEN)
    assert batch["block_label_mask"].any()


def test_shapes_and_dtypes():
    pack = make_pack([20, 11])
    plan = build_plan(layout_of(pack), 31, 2)
    batch = batch_of(pack, plan, 1)
    rows, blocks = plan.num_rows(1), plan.blocks(1).size
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "context_features": ((rows, 3), torch.float32),
        "context_positions": ((rows,), torch.int64),
        "block_tokens": ((blocks * 4,), torch.int64),
        "block_positions": ((blocks * 4,), torch.int64),
        "block_real_tokens": ((blocks * 4,), torch.int64),
        "block_labels": ((blocks * 4,), torch.int64),
        "block_label_mask": ((blocks * 4,), torch.bool),
        "block_keep_mask": ((blocks,), torch.bool),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a11_tail_padding_is_zeros_that_no_block_sees(strategy):
    """698 tokens in 704 rows: padding is never read, so its content cannot matter."""
    pack = make_pack([500, 198])
    plan = build_plan(layout_of(pack, num_anchors=8), 704, 4, strategy=strategy)
    reader, padding = Reader(pack), []
    for rank in range(4):
        batch = batch_of(pack, plan, rank, reader)
        rows = plan.rows(rank)
        tail = torch.from_numpy(rows >= 698)
        assert batch["context_features"].shape[0] == rows.size
        assert not batch["context_features"][tail].any()
        assert not batch["context_positions"][tail].any()
        assert plan.key_ranges(rank)[1].max() <= int((~tail).sum())
        padding += rows[tail.numpy()].tolist()
    assert sorted(padding) == list(range(698, 704))
    assert sorted(reader.read) == list(range(698))


def test_ranks_without_rows_or_without_kept_blocks():
    pack = make_pack([3])
    plan = build_plan(BlockLayout([1], [0], [True], 2), 3, 5)
    sizes = [batch_of(pack, plan, rank)["context_features"].shape for rank in range(5)]
    assert sorted(sizes) == [(0, 3), (0, 3), (1, 3), (1, 3), (1, 3)]
    assert [bool(batch_of(pack, plan, rank)["block_keep_mask"]) for rank in range(5)] == [
        True,
        *[False] * 4,
    ]


def test_pack_without_a_token():
    pack = make_pack([0])
    plan = build_plan(layout_of(pack), 8, 2)
    batch = batch_of(pack, plan, 1)
    assert batch["context_features"].shape == (4, 3)
    assert batch["block_tokens"].tolist() == [MASK_TOKEN] * 8
    assert not batch["block_label_mask"].any()


@pytest.mark.parametrize(
    ("lengths", "anchors", "starts", "message"),
    [
        ([8], [9], [0], "anchor 9 with document start 0 is in no document of the pack"),
        ([4, 12], [6], [0], "anchor 6 with document start 0 is in no document of the pack"),
        ([20], [6], [0], "the pack holds 20 tokens, the plan covers 16 context rows"),
    ],
)
def test_a_plan_of_another_pack_is_refused(lengths, anchors, starts, message):
    plan = build_plan(BlockLayout(anchors, starts, [True], 4), 16, 1)
    with pytest.raises(ConfigError, match=message):
        batch_of(make_pack(lengths), plan, 0)


def test_a_reader_that_returns_other_rows_is_refused():
    pack = make_pack([16])
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, 2)
    with pytest.raises(ConfigError, match=r"returned shape \(7, 2\) for 8 rows"):
        batch_of(pack, plan, 0, lambda ranges: torch.zeros(7, 2))


def online_batch(pack, plan, features):
    source = RowSource.contiguous(plan.context_length, 1)
    return get_online_batch_on_this_cp_rank(
        pack, plan, source, features, None, mask_token_id=MASK_TOKEN
    )


@pytest.mark.parametrize("megatrons", [False, True], ids=["rows", "rows-and-batch"])
def test_online_tail_padding_is_zeros_whatever_the_target_made_of_it(megatrons):
    pack = make_pack([20, 7])
    plan = build_plan(layout_of(pack), 32, 1, strategy="none")
    features = torch.cat([Reader(pack)(np.array([[0, 27]])), torch.full((5, 3), torch.nan)])
    features = (features[:, None] if megatrons else features).requires_grad_()
    actual, expected = online_batch(pack, plan, features), batch_of(pack, plan, 0)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    actual["context_features"].sum().backward()
    assert (features.grad[:27] == 1).all()
    assert (features.grad[27:] == 0).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32,), r"features have shape \(32,\); they must be \[rows, features\]"),
        ((16, 2, 3), r"features have shape \(16, 2, 3\); .*--micro-batch-size 1"),
        ((31, 3), r"context_features have shape \(31, 3\) .* has 32 rows"),
    ],
)
def test_online_features_of_another_shape_are_refused(shape, message):
    pack = make_pack([20, 7])
    plan = build_plan(layout_of(pack), 32, 1, strategy="none")
    with pytest.raises(ConfigError, match=message):
        online_batch(pack, plan, torch.zeros(shape))
