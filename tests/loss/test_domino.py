"""Domino's chunked loss against its naive twin, fp64 and small numbers worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.loss import IGNORED_PREDICTION
from megatron_splitkv.loss.domino import (
    DominoLoss,
    base_loss_weight,
    chunked_domino_loss,
    naive_domino_loss,
)
from megatron_splitkv.testing import relative_error

ROWS, HIDDEN, WIDTH, VOCAB = 37, 24, 10, 101


def problem(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    features = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    features[1::5] = 0.0  # the backbone's alone
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    correction = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weights[::3] = 0.0
    return hidden, features, head, correction, labels, weights


def loss_and_grads(
    function: Callable[..., DominoLoss],
    hidden: torch.Tensor,
    features: torch.Tensor,
    head: torch.Tensor,
    correction: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[DominoLoss, list[torch.Tensor]]:
    trained = [t.detach().clone().requires_grad_() for t in (hidden, features, correction)]
    found = function(trained[0], trained[1], head, trained[2], *args, **kwargs)
    (3.0 * found.numerator).backward()  # a factor, so that the incoming gradient is seen to count
    gradients = [t.grad for t in trained if t.grad is not None]
    assert len(gradients) == 3
    return found, gradients


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("base_weight", "chunk_rows"), [(0.0, 5), (0.3, 1), (0.7, 1000), (1.0, 5)])
def test_equals_naive_twin_and_fp64(
    base_weight: float, chunk_rows: int, softcap: float | None
) -> None:
    tensors = problem()
    ours, gradients = loss_and_grads(
        chunked_domino_loss, *tensors, base_weight, softcap=softcap, chunk_rows=chunk_rows
    )
    naive, _ = loss_and_grads(naive_domino_loss, *tensors, base_weight, softcap=softcap)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    truth, true_gradients = loss_and_grads(naive_domino_loss, *exact, base_weight, softcap=softcap)
    for found, expected in zip(ours[:3], truth[:3], strict=True):
        assert relative_error(found, expected) < 1e-6
    for gradient, expected in zip(gradients, true_gradients, strict=True):
        assert relative_error(gradient, expected) < 2e-6
    assert torch.equal(ours.predictions, naive.predictions)
    assert torch.equal(ours.base_predictions, naive.base_predictions)
    assert not torch.equal(ours.predictions, ours.base_predictions)
    # At the start the correction learns nothing: the gradient is zero, not only small.
    assert bool(gradients[2].any()) == (base_weight < 1)


def test_fp64_passes_gradcheck() -> None:
    hidden, features, head, correction, labels, weights = problem(torch.float64, rows=7)
    head, labels = head[:11, :4], labels % 11  # a few numbers: each is moved twice
    trained = tuple(
        t.requires_grad_() for t in (hidden[:, :4], features[:, :3], correction[:11, :3])
    )
    assert torch.autograd.gradcheck(
        lambda h, f, c: (
            chunked_domino_loss(
                h, f, head, c, labels, weights, 0.4, softcap=2.0, chunk_rows=3
            ).numerator
        ),
        trained,
    )


def test_two_tokens_by_hand() -> None:
    """Base logits ln 3 and 0, corrected to 0 and 0; token 0 is due, at a price of 2."""
    found, _ = loss_and_grads(
        chunked_domino_loss,
        torch.tensor([[1.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[math.log(3.0)], [0.0]]),
        torch.tensor([[math.log(3.0)], [0.0]]),
        torch.tensor([0]),
        torch.tensor([2.0]),
        0.25,
    )
    final, base = 2 * math.log(2.0), 2 * math.log(4.0 / 3.0)
    assert float(found.final) == pytest.approx(final)
    assert float(found.base) == pytest.approx(base)
    assert found.numerator.item() == pytest.approx(0.75 * final + 0.25 * base)


def test_bf16_error_is_within_twice_the_naive_one() -> None:
    tensors = problem(torch.bfloat16)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    truth, true_gradients = loss_and_grads(naive_domino_loss, *exact, 0.4)
    ours, gradients = loss_and_grads(chunked_domino_loss, *tensors, 0.4, chunk_rows=6)
    naive, naive_gradients = loss_and_grads(naive_domino_loss, *tensors, 0.4)
    assert ours.numerator.dtype == torch.float32
    bound = 2 * relative_error(naive.numerator, truth.numerator) + 1e-6
    assert relative_error(ours.numerator, truth.numerator) <= bound
    for gradient, twin, expected in zip(gradients, naive_gradients, true_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative_error(gradient, expected) <= 2 * relative_error(twin, expected)


def test_rows_of_weight_zero_are_ignored_whatever_they_hold() -> None:
    hidden, features, head, correction, labels, weights = problem()
    tensors = hidden, features, head, correction, labels, weights
    expected, expected_gradients = loss_and_grads(chunked_domino_loss, *tensors, 0.4)
    hidden[weights == 0] = features[weights == 0] = math.nan
    labels[weights == 0] = -100
    found, gradients = loss_and_grads(chunked_domino_loss, *tensors, 0.4)
    assert torch.equal(found.numerator, expected.numerator)
    assert all(map(torch.equal, gradients, expected_gradients))
    for gradient in gradients[:2]:
        assert (gradient[weights == 0] == 0).all()
    for predictions in found[3:]:
        assert (predictions[weights == 0] == IGNORED_PREDICTION).all()
        assert (predictions[weights > 0] >= 0).all()


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_supervised_gives_zero_with_a_graph(rows: int) -> None:
    *tensors, _ = problem(rows=rows)
    found, gradients = loss_and_grads(chunked_domino_loss, *tensors, torch.zeros(rows), 0.4)
    assert found.numerator == 0
    assert not any(gradient.any() for gradient in gradients)


class WideOperations(TorchDispatchMode):
    """Rows of tensors as wide as the vocabulary: the most of one, and all that products made."""

    largest = multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                rows = tensor.numel() // VOCAB
                self.largest = max(self.largest, rows)
                if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                    self.multiplied += rows
        return out


def test_logits_exist_for_a_chunk_and_are_computed_once() -> None:
    hidden, features, head, correction, labels, weights = problem()
    # The transposed matrices are as wide, but 2 rows.
    tensors = (hidden[:, :2], features[:, :2], head[:, :2], correction[:, :2], labels, weights)
    with WideOperations() as chunked:
        loss_and_grads(chunked_domino_loss, *tensors, 0.4, chunk_rows=4)
    with WideOperations() as naive:
        loss_and_grads(naive_domino_loss, *tensors, 0.4)
    priced = int((weights > 0).sum())
    assert chunked.largest == 4
    assert naive.largest == priced
    assert chunked.multiplied == 2 * priced  # by the head, by the correction


def test_weight_of_the_base_loss_falls_linearly() -> None:
    progress = (0.0, 0.1, 0.25, 0.4, 0.5, 0.9, 1.0)
    expected = (1.0, 0.8, 0.5, 0.2, 0.0, 0.0, 0.0)
    assert [base_loss_weight(p, 0.5) for p in progress] == pytest.approx(expected)
    assert base_loss_weight(0.5, 1.0) == pytest.approx(0.5)
