"""Rows that change their rank, against their naive twin: gather everything, then index."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.batch import redistribute_rows, undispatch_rows
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.redistribution import Redistribution, rows_moved
from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.testing import gloo_pool, subgroup
from tests.plan.layouts import layout_of, random_plan
from tests.plan.test_redistribution import random_source

SIZES = [1, 2, 3, 4, 5, 8]


@dataclass(frozen=True)
class Case:
    """Rows of one kind to be moved.

    Args:
        plan: the plan's owners.
        source: the source's.
        dtype: of the rows.
        width: their trailing dimensions.
        strided: rows lie apart in memory.
    """

    plan: ContextPlan
    source: RowSource
    dtype: torch.dtype = torch.float32
    width: tuple[int, ...] = (6,)
    strided: bool = False

    def everything(self, seed: int) -> torch.Tensor:
        """All rows, the same on every rank; exact in any dtype."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.plan.context_length, *self.width)
        return torch.randint(-99, 99, shape, generator=generator).to(self.dtype)

    def of_source(self, rank: int, seed: int) -> torch.Tensor:
        """The rank's rows of `everything` in the source's order, rubbish where it has padding."""
        rows = torch.from_numpy(self.source.rows(rank))
        padded = torch.cat([self.everything(seed), self.everything(seed)[:1]])
        x = padded[torch.where(rows < 0, self.plan.context_length, rows)]
        if self.dtype.is_floating_point:
            x[rows < 0] = torch.nan
        return x

    def of_plan(self, rank: int, seed: int) -> torch.Tensor:
        """The rank's rows of `everything` in the plan's order."""
        return self.everything(seed)[torch.from_numpy(self.plan.rows(rank))]


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same rows as every second one of a larger tensor."""
    return torch.stack([x, torch.full_like(x, 7)], dim=1)[:, 0]


def _check(case: Case, function: Callable[..., Any], given: Any, wanted: Any, group: Any) -> None:
    """Content, gradients and what travelled, on this rank."""
    rank = group.rank()
    x = given(rank, 0)
    x = _apart(x) if case.strided else x
    if case.dtype.is_floating_point:
        x.requires_grad_()
    with CommMeter() as forward:
        moved = function(x, case.plan, case.source, group, label="rows")
    expected = wanted(rank, 0)
    padding = torch.from_numpy(case.source.rows(rank) < 0)
    if function is undispatch_rows:
        expected[padding] = 0
    assert moved.dtype == case.dtype
    assert torch.equal(moved, expected)
    assert moved.is_contiguous()

    # Each rank's rows are its own: what leaves it are the rows that it has and will not have.
    old, new = case.source.rows(rank), case.plan.rows(rank)
    old, new = (old, new) if function is redistribute_rows else (new, old)
    leaving, coming = (np.setdiff1d(a[a >= 0], b).size for a, b in ((old, new), (new, old)))
    row_bytes = x[:1].numel() * case.dtype.itemsize if x.shape[0] else 0
    calls = int(case.source.cp_size > 1)
    assert (forward.calls(), forward.calls(op="all_to_all_v", label="rows")) == (calls, calls)
    assert forward.bytes() == leaving * row_bytes
    if not case.dtype.is_floating_point:
        return
    grad = wanted(rank, 1)
    grad = _apart(grad) if case.strided else grad
    with CommMeter() as backward:
        moved.backward(grad)
    expected = given(rank, 1)
    if function is redistribute_rows:
        expected[padding] = 0
    if function is undispatch_rows:  # gradients of padding go nowhere
        assert not torch.isnan(x.grad).any()
    assert torch.equal(x.grad, expected)
    assert (backward.calls(), backward.calls(label="grad_rows")) == (calls, calls)
    row_bytes = moved[:1].numel() * case.dtype.itemsize if moved.shape[0] else 0
    assert backward.bytes() == coming * row_bytes


def _both_ways(cases: list[Case], cp_size: int) -> None:
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return
    for case in cases:
        _check(case, redistribute_rows, case.of_source, case.of_plan, group)
        _check(case, undispatch_rows, case.of_plan, case.of_source, group)


def _megatron_cases(cp_size: int) -> list[Case]:
    """Real strategies from Megatron's layouts, with its shapes and dtypes."""
    lengths = [6 * cp_size, 2 * cp_size, 10 * cp_size]
    bounds = np.append(0, np.cumsum(lengths))
    documents = [(length, list(range(0, length, 3)), 1) for length in lengths]
    layout, total = layout_of(documents, block_size=4)
    real = [length - 1 for length in lengths]
    cut, cut_total = layout_of([(n, [n - 1], 0) for n in real], block_size=4)
    padded = RowSource.zigzag_documents(bounds, cp_size, lengths=real)
    sources = (
        RowSource.contiguous(total, cp_size),
        RowSource.zigzag(total, cp_size),
        RowSource.zigzag_documents(bounds, cp_size),
    )
    cases = []
    for strategy in ("none", "lpt", "balanced"):
        plan = build_plan(layout, total, cp_size, strategy=strategy, chunks_per_rank=2)
        cases += [Case(plan, source) for source in sources]
    cases += [
        Case(plan, sources[2], torch.bfloat16, width=(1, 6)),  # [S, 1, h]
        Case(plan, sources[1], torch.int64, width=()),  # token ids
        Case(plan, sources[1], torch.bfloat16, strided=True),
        Case(build_plan(cut, cut_total, cp_size, chunks_per_rank=3), padded, width=(1, 6)),
    ]
    return cases


@pytest.mark.parametrize("cp_size", SIZES)
def test_rows_gradients_and_bytes(cp_size: int) -> None:
    """Random owners, so that some ranks hold nothing before or after."""
    cases = _megatron_cases(cp_size)
    for seed in range(8):
        plan = random_plan(seed, cp_size)
        source = random_source(seed, plan.context_length, cp_size, padding=seed % 2 > 0)
        cases.append(Case(plan, source, strided=seed % 3 > 0))
    if cp_size == 8:
        assert any(c.plan.num_rows(r) == 0 for c in cases for r in range(cp_size))
        assert any(c.source.num_rows(r) == 0 for c in cases for r in range(cp_size))
    gloo_pool(8).run(_both_ways, cases, cp_size)


def _ways_worked_out() -> tuple[int, list[bool]]:
    """How often for one plan and source, and whether these are gone when nobody wants them."""
    plan, source = (case := _megatron_cases(4)[1]).plan, case.source
    group, made = dist.group.WORLD, Mock(wraps=Redistribution.of)
    with patch.object(Redistribution, "of", made):
        for width in (3, 5):
            x = torch.ones(source.num_rows(group.rank()), width, requires_grad=True)
            moved = redistribute_rows(x, plan, source, group)
            undispatch_rows(moved, plan, source, group).sum().backward()
            assert torch.equal(x.grad, torch.ones_like(x))
        count = made.call_count
        redistribute_rows(x, ContextPlan.from_arrays(plan.to_arrays()), source, group)
        assert made.call_count == count + 1
    made.reset_mock()  # it remembers what it was called with
    ends = [weakref.ref(source), weakref.ref(plan)]
    gone = []
    del case, source
    gc.collect()
    gone.append(ends[0]() is None)
    del plan, moved
    gc.collect()
    return count, [*gone, ends[1]() is None]


def test_tensors_and_gradients_of_a_micro_batch_share_their_ways() -> None:
    for answer in gloo_pool(4).run(_ways_worked_out):
        assert answer == (1, [True, True])


def _bytes_sent(case: Case) -> float:
    with CommMeter() as meter:
        redistribute_rows(
            case.of_source(dist.get_rank(), 0), case.plan, case.source, dist.group.WORLD
        )
    return meter.bytes()


def test_the_group_sends_the_rows_that_the_plan_counts() -> None:
    case = _megatron_cases(4)[-4]
    sent = gloo_pool(4).run(_bytes_sent, case)
    assert sum(sent) == rows_moved(case.plan, case.source) * 6 * 2


def _refusals(plan: ContextPlan, source: RowSource) -> list[str]:
    group, messages = dist.group.WORLD, []
    attempts = (
        (torch.zeros(source.num_rows(dist.get_rank()) + 1, 2), source),
        (torch.zeros(()), source),
        (torch.zeros(8, 2), RowSource.contiguous(8, 8)),
        (torch.zeros(2, 2), RowSource.contiguous(16, 4)),
    )
    with CommMeter() as meter:
        for x, at in attempts:
            try:
                redistribute_rows(x, plan, at, group)
            except ConfigError as error:
                messages.append(str(error))
    assert meter.calls() == 0
    return messages


def test_what_does_not_fit_is_refused_before_anything_travels() -> None:
    layout, total = layout_of([(32, [5, 9], 0)], block_size=4)
    plan, source = build_plan(layout, total, 4), RowSource.zigzag(total, 4)
    for messages in gloo_pool(4).run(_refusals, plan, source):
        assert [message[:40] for message in messages] == [
            "context_rows have shape (9, 2) on this r",
            "context_rows have shape () on this rank;",
            "the plan is for 4 context-parallel ranks",
            "the plan covers 32 context rows, the sou",
        ]
    with pytest.raises(ConfigError, match="the plan is for 4 context-parallel ranks, the group"):
        redistribute_rows(torch.zeros(32, 2), plan, source, None)
