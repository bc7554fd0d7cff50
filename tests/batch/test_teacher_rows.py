"""The target's final hidden states, one row for every trained slot and none that nobody needs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.batch import get_batch_on_this_cp_rank, get_online_batch_on_this_cp_rank
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack, draw_blocks, feature_reader, final_hidden_reader
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.testing import gloo_pool
from megatron_splitkv.testing.synthetic import make_synthetic_store

MASK_TOKEN = 9999


def make_pack(lengths: list[int], untrained: tuple[int, ...] = ()) -> Pack:
    """Token ids are 100 + packed position."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(int(cu[-1]), dtype=bool)
    mask[list(untrained)] = False
    return Pack(np.arange(len(lengths)), cu, 100 + np.arange(cu[-1]), mask)


class Reader:
    """Rows equal to the packed position plus a half, and a record of the ranges."""

    def __init__(self) -> None:
        self.ranges: list[list[int]] = []

    def __call__(self, row_ranges: np.ndarray) -> torch.Tensor:
        assert row_ranges.dtype == np.int64
        assert row_ranges.shape[1] == 2
        self.ranges += row_ranges.tolist()
        rows = np.concatenate([np.arange(*r) for r in row_ranges] or [np.empty(0, dtype=int)])
        return torch.from_numpy(rows).float()[:, None].repeat(1, 2) + 0.5


def read_nothing(ranges: np.ndarray) -> torch.Tensor:
    return torch.zeros(int((ranges[:, 1] - ranges[:, 0]).sum()), 3)


def batch_of(pack: Pack, plan: ContextPlan, rank: int, shift: int, reader: Any) -> dict[str, Any]:
    return get_batch_on_this_cp_rank(
        pack,
        plan,
        rank,
        read_nothing,
        mask_token_id=MASK_TOKEN,
        label_shift=shift,
        read_final_hidden=reader,
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_the_row_lies_one_position_before_the_label(shift: int) -> None:
    """Anchor 5 of sixteen tokens, position 7 is not supervised: by hand."""
    pack, reader = make_pack([16], untrained=(7,)), Reader()
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, 1)
    batch = batch_of(pack, plan, 0, shift, reader)
    labels = [105, 106, 107, 108] if shift == 0 else [106, 107, 108, 109]
    assert batch["block_labels"].tolist() == labels
    assert batch["block_real_tokens"].tolist() == [105, 106, 107, 108]
    trained = [False, True, False, True] if shift == 0 else [True, False, True, True]
    assert batch["block_label_mask"].tolist() == trained
    rows = [0, 5.5, 0, 7.5] if shift == 0 else [5.5, 0, 7.5, 8.5]
    assert batch["block_teacher_hidden"].tolist() == [[row, row] for row in rows]
    assert reader.ranges == ([[5, 6], [7, 8]] if shift == 0 else [[5, 6], [7, 9]])


def test_without_a_reader_there_is_no_teacher() -> None:
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, 1)
    assert "block_teacher_hidden" not in batch_of(make_pack([16]), plan, 0, 1, None)


def test_overlapping_anchors_read_a_row_once_and_neighbours_at_one_go() -> None:
    pack, reader = make_pack([20, 12]), Reader()
    layout = BlockLayout([3, 4, 9, 22, 30], [0, 0, 0, 20, 20], [True] * 5, 4)
    plan = build_plan(layout, 32, 1)
    batch = batch_of(pack, plan, 0, 1, reader)
    # 3..6 and 4..7 in one, 9..12, 22..25; at 30 the document has one more token.
    assert reader.ranges == [[3, 8], [9, 13], [22, 26], [30, 31]]
    trained = batch["block_label_mask"]
    expected = torch.where(trained, batch["block_labels"] - 100 - 1 + 0.5, 0)
    assert torch.equal(batch["block_teacher_hidden"][:, 0], expected)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cp_size", [2, 3, 5])
def test_ranks_together_equal_one_rank(cp_size: int, shift: int) -> None:
    rng = np.random.default_rng(0)
    lengths = [33, 0, 1, 2, 70, 41]
    pack = make_pack(lengths, tuple(np.flatnonzero(rng.random(sum(lengths)) < 0.2)))
    layout = draw_blocks(pack, num_anchors=4, block_size=5, seed=0, item_index=0)
    one = batch_of(pack, build_plan(layout, 147, 1), 0, shift, Reader())["block_teacher_hidden"]
    plan = build_plan(layout, 147, cp_size)
    parts = [batch_of(pack, plan, rank, shift, Reader()) for rank in range(cp_size)]
    together = torch.cat([part["block_teacher_hidden"] for part in parts])
    assert torch.equal(together[: len(one)], one)
    assert not together[len(one) :].any()


def test_nothing_trained_reads_nothing() -> None:
    pack, reader = make_pack([6], untrained=tuple(range(6))), Reader()
    plan = build_plan(BlockLayout([1], [0], [True], 4), 6, 2)
    for rank in range(2):
        teacher = batch_of(pack, plan, rank, 1, reader)["block_teacher_hidden"]
        assert teacher.tolist() == [[0, 0]] * 4
    assert reader.ranges == []


def test_a_reader_that_returns_other_rows_is_refused() -> None:
    plan = build_plan(BlockLayout([5], [0], [True], 4), 16, 1)
    with pytest.raises(ConfigError, match=r"returned shape \(7, 2\) for 4 rows"):
        batch_of(make_pack([16]), plan, 0, 1, lambda ranges: torch.zeros(7, 2))


def test_bytes_of_the_store_are_those_of_the_wanted_rows(tmp_path: Path) -> None:
    store = make_synthetic_store(tmp_path / "s", [40, 25], final_hidden=True)
    pack = Pack(
        np.array([1, 0]),
        np.array([0, 25, 65]),
        np.concatenate([store.token_ids(1), store.token_ids(0)]),
        np.ones(65, dtype=bool),
    )
    layout = BlockLayout([20, 22, 60], [0, 0, 25], [True] * 3, 4)
    plan = build_plan(layout, 65, 1)
    batch = get_batch_on_this_cp_rank(
        pack,
        plan,
        0,
        feature_reader(store, pack),
        mask_token_id=63,
        label_shift=1,
        read_final_hidden=final_hidden_reader(store, pack),
    )
    features = 65 * store.meta.feature_width * 4
    # Rows 20..23 (24 is the document's last token and predicts none) and 60..63.
    assert store.bytes_read - features == (4 + 4) * 8 * 4
    assert torch.equal(batch["block_teacher_hidden"][:4], store.read_final_hidden(1, 20, 24))
    assert torch.equal(batch["block_teacher_hidden"][4:6], store.read_final_hidden(1, 22, 24))
    assert not batch["block_teacher_hidden"][6:8].any()
    assert torch.equal(batch["block_teacher_hidden"][8:], store.read_final_hidden(0, 35, 39))


def online_case(cp_size: int) -> tuple[Pack, ContextPlan, RowSource, torch.Tensor]:
    pack = make_pack([33, 2, 70, 40], untrained=(3, 50, 51, 52))
    layout = draw_blocks(pack, num_anchors=5, block_size=4, seed=1, item_index=0)
    plan = build_plan(layout, 160, cp_size)
    return pack, plan, RowSource.zigzag(160, cp_size), torch.arange(160.0)[:, None].repeat(1, 2)


def _online(cp_size: int, megatrons: bool) -> tuple[torch.Tensor, int, int]:
    pack, plan, source, everything = online_case(cp_size)
    group = dist.group.WORLD
    rank = group.rank()
    mine = everything[torch.from_numpy(source.rows(rank))].requires_grad_()
    with CommMeter() as meter:
        batch = get_online_batch_on_this_cp_rank(
            pack,
            plan,
            source,
            torch.zeros(len(mine), 3),
            group,
            mask_token_id=MASK_TOKEN,
            label_shift=1,
            final_hidden=mine[:, None] if megatrons else mine,
        )
    assert not batch["block_teacher_hidden"].requires_grad
    records = [r for r in meter.records if r.label == "teacher_hidden"]
    return batch["block_teacher_hidden"], len(records), int(sum(r.bytes for r in records))


@pytest.mark.parametrize("megatrons", [False, True], ids=["rows", "rows-and-batch"])
def test_online_ranks_fetch_what_the_store_would_give(megatrons: bool) -> None:
    pack, plan, source, _ = online_case(4)
    results = gloo_pool(4).run(_online, 4, megatrons)
    sent = 0
    for rank, (teacher, calls, _) in enumerate(results):
        read = Reader()
        expected = batch_of(pack, plan, rank, 1, read)
        trained = expected["block_label_mask"][:, None]
        assert torch.equal(teacher, torch.where(trained, expected["block_teacher_hidden"] - 0.5, 0))
        assert calls == 1
        wanted = np.concatenate([np.arange(*r) for r in read.ranges] or [np.empty(0, dtype=int)])
        sent += len(set(wanted.tolist()) - set(source.rows(rank).tolist()))
    assert sum(size for _, _, size in results) == sent * 2 * 4 > 0


def test_online_rows_that_do_not_fit_are_refused() -> None:
    pack, plan, source, everything = online_case(1)
    with pytest.raises(ConfigError, match=r"final_hidden has shape \(159, 2\) .* 160 rows"):
        get_online_batch_on_this_cp_rank(
            pack,
            plan,
            source,
            torch.zeros(160, 3),
            None,
            mask_token_id=MASK_TOKEN,
            final_hidden=everything[1:],
        )
