"""Chunked cross-entropy against its naive twin and fp64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.loss import (
    IGNORED_PREDICTION,
    chunked_draft_loss,
    naive_draft_loss,
)
from megatron_splitkv.testing import relative_error

ROWS, HIDDEN, VOCAB = 37, 24, 101


def problem(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weights[::3] = 0.0
    return hidden, head, labels, weights


def loss_and_grad(function, hidden, *args, **kwargs):  # type: ignore[no-untyped-def]
    hidden = hidden.detach().clone().requires_grad_()
    priced = function(hidden, *args, **kwargs)
    (3.0 * priced.numerator).backward()  # a factor, so that the incoming gradient counts
    return priced.numerator.detach(), hidden.grad, priced.predictions


@pytest.mark.parametrize("chunk_rows", [1, 5, ROWS, 1000])
def test_equals_naive_twin_and_fp64(chunk_rows: int) -> None:
    hidden, head, labels, weights = problem()
    loss, grad, predictions = loss_and_grad(
        chunked_draft_loss, hidden, head, labels, weights, chunk_rows=chunk_rows
    )
    naive_loss, naive_grad, naive_predictions = loss_and_grad(
        naive_draft_loss, hidden, head, labels, weights
    )
    true_loss, true_grad, _ = loss_and_grad(
        naive_draft_loss, hidden.double(), head.double(), labels, weights.double()
    )
    torch.testing.assert_close(loss, naive_loss)
    assert relative_error(grad, naive_grad) < 1e-6
    assert relative_error(loss, true_loss) < 1e-6
    assert relative_error(grad, true_grad) < 1e-6
    assert torch.equal(predictions, naive_predictions)


def test_fp64_passes_gradcheck() -> None:
    hidden, head, labels, weights = problem(torch.float64, rows=7)
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: chunked_draft_loss(x, head, labels, weights, chunk_rows=3).numerator, (hidden,)
    )


def test_bf16_error_is_within_twice_the_naive_one() -> None:
    hidden, head, labels, weights = problem(torch.bfloat16)
    truth = loss_and_grad(
        naive_draft_loss, hidden.double(), head.double(), labels, weights.double()
    )
    ours = loss_and_grad(chunked_draft_loss, hidden, head, labels, weights)
    naive = loss_and_grad(naive_draft_loss, hidden, head, labels, weights)
    assert ours[0].dtype == torch.float32
    assert relative_error(ours[0], truth[0]) <= 2 * relative_error(naive[0], truth[0]) + 1e-6
    assert relative_error(ours[1], truth[1]) <= 2 * relative_error(naive[1], truth[1])


def test_rows_of_weight_zero_are_ignored_whatever_they_hold() -> None:
    hidden, head, labels, weights = problem()
    expected = loss_and_grad(chunked_draft_loss, hidden, head, labels, weights)
    hidden[weights == 0] = math.nan
    labels[weights == 0] = -100
    loss, grad, predictions = loss_and_grad(chunked_draft_loss, hidden, head, labels, weights)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad, expected[1])
    assert (grad[weights == 0] == 0).all()
    assert (predictions[weights == 0] == IGNORED_PREDICTION).all()


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_supervised_gives_zero_with_a_graph(rows: int) -> None:
    hidden, head, labels, _ = problem(rows=rows)
    loss, grad, _ = loss_and_grad(
        chunked_draft_loss, hidden, head, labels, torch.zeros(rows), chunk_rows=2
    )
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(hidden))


def test_huge_logits_stay_finite() -> None:
    hidden, head, labels, weights = problem()
    loss, grad, _ = loss_and_grad(chunked_draft_loss, hidden * 1e4, head, labels, weights)
    assert loss.isfinite()
    assert grad.isfinite().all()


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary that an operation returned."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return out


def test_logits_never_exist_for_more_rows_than_a_chunk() -> None:
    hidden, head, labels, weights = problem()
    hidden, head = hidden[:, :2], head[:, :2]  # the transposed head is as wide, but 2 rows
    with LargestLogits() as chunked:
        loss_and_grad(chunked_draft_loss, hidden, head, labels, weights, chunk_rows=4)
    with LargestLogits() as naive:
        loss_and_grad(naive_draft_loss, hidden, head, labels, weights)
    assert chunked.rows == 4
    assert naive.rows == int((weights > 0).sum())
