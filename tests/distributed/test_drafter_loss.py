"""The loss over TP and CP ranks, without a model."""

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import CommMeter
from megatron_splitkv.loss import (
    chunked_draft_loss,
    fixed_point_loss,
    naive_draft_loss,
)
from megatron_splitkv.testing import relative_error
from tests.drafter.harness import on_ranks

# Ranks that import Megatron on a busy machine take their time.

ROWS, HIDDEN, VOCAB = 29, 16, 83


def problem() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    head[70] = head[3]  # equal logits on two ranks: the lower id is predicted
    hidden[4] = 10 * head[3]
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    weights[::4] = 0.0
    weights[4] = 1.0
    return hidden, head, labels, weights


def vocab_parallel(bounds: list[int]) -> tuple[torch.Tensor, ...]:
    hidden, head, labels, weights = problem()
    rank = dist.get_rank()
    hidden.requires_grad_()
    with CommMeter() as meter:
        found = chunked_draft_loss(
            hidden,
            head[bounds[rank] : bounds[rank + 1]],
            labels,
            weights,
            tp_group=dist.group.WORLD,
            vocab_start=bounds[rank],
            chunk_rows=7,
        )
        (2.0 * found.numerator).backward()
    assert hidden.grad is not None
    numerator, predictions = found.numerator, found.predictions
    return numerator.detach(), hidden.grad, predictions, torch.tensor(meter.calls())


@pytest.mark.parametrize("bounds", [[0, 20, 41, 62, 83], [0, 1, 2, 80, 83]], ids=["even", "uneven"])
def test_split_vocabulary_equals_the_whole_one(bounds: list[int]) -> None:
    hidden, head, labels, weights = problem()
    hidden.requires_grad_()
    expected = naive_draft_loss(hidden, head, labels, weights)
    numerator, predictions = expected.numerator, expected.predictions
    (2.0 * numerator).backward()
    assert predictions[4] == 3
    for loss, grad, tokens, calls in on_ranks(4, vocab_parallel, bounds):
        torch.testing.assert_close(loss, numerator.detach())
        assert relative_error(grad, hidden.grad) < 1e-6
        assert torch.equal(tokens, predictions)
        assert calls == 3 * -(-int((weights > 0).sum()) // 7) + 1  # per chunk, and one dgrad


def reduce_over_cp(per_rank: list[tuple[int, float]], decay: float) -> tuple[float, int]:
    """Global loss of CP ranks given as (tokens, mean loss); `decay` makes weights fractional."""
    tokens, mean = per_rank[dist.get_rank()]
    weights = torch.full((tokens,), decay)
    loss, count = fixed_point_loss(weights.sum() * mean, weights, cp_group=dist.group.WORLD)
    sums = torch.stack([loss, count.float()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), int(count)


@pytest.mark.parametrize("decay", [1.0, 0.37, 0.0013])
def test_a3_a_hundred_tokens_at_2_and_ten_at_5_are_25_over_11(decay: float) -> None:
    per_rank = [(100, 2.0), (10, 5.0), (0, 0.0), (0, 0.0)]
    results = on_ranks(4, reduce_over_cp, per_rank, decay)
    for loss, _ in results:
        assert loss == pytest.approx(250 / 110, rel=1e-6)
        assert loss != pytest.approx(3.5, rel=0.1)
    counts = [count for _, count in results]
    assert counts == [round(256 * 110 * decay), 0, 0, 0]


def test_a12_no_supervision_on_any_rank_counts_nothing() -> None:
    for loss, count in on_ranks(4, reduce_over_cp, [(0, 0.0)] * 4, 1.0):
        assert count == 0
        assert loss != loss or loss == 0.0  # 0 / 0 here; Megatron clamps the divisor of gradients
