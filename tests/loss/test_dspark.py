"""DSpark's chunked loss against its naive twin, fp64 and small numbers worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.loss import IGNORED_PREDICTION
from megatron_splitkv.loss.dspark import (
    DSparkLoss,
    chunked_dspark_loss,
    confidence_loss,
    leading_slots,
    naive_dspark_loss,
)
from megatron_splitkv.loss.slots import slot_weights
from megatron_splitkv.testing import relative_error

ROWS, HIDDEN, RANK, VOCAB = 37, 24, 10, 101
WEIGHTS = {"ce_weight": 0.1, "l1_weight": 0.9}


def problem(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> list[torch.Tensor]:
    """Hidden, latent, head, Markov head, labels, weights, teacher."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    labels = torch.randint(VOCAB, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weights[::3] = 0.0
    hidden, head = draw(rows, HIDDEN), draw(VOCAB, HIDDEN, scale=0.4)
    teacher = hidden + draw(rows, HIDDEN, scale=0.5)
    return [hidden, draw(rows, RANK), head, draw(VOCAB, RANK, scale=0.3), labels, weights, teacher]


def loss_and_grads(
    function: Callable[..., DSparkLoss], tensors: list[torch.Tensor], **kwargs: Any
) -> tuple[DSparkLoss, list[torch.Tensor]]:
    hidden, latent, head, markov, *others = tensors
    trained = [t.detach().clone().requires_grad_() for t in (hidden, latent, markov)]
    found = function(trained[0], trained[1], head, trained[2], *others, **(WEIGHTS | kwargs))
    (3.0 * found.numerator).backward()  # a factor, so that the incoming gradient is seen to count
    gradients = [t.grad for t in trained if t.grad is not None]
    assert len(gradients) == 3
    return found, gradients


def exact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def test_slots_behind_a_gap_are_not_trained_and_the_first_weighs_one() -> None:
    """Four slots a block, gamma 2: exp(-k / 2), from slot 0 on."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    leading = leading_slots(mask.flatten(), 4)
    assert leading.view(4, 4).sum(dim=1).tolist() == [4, 1, 0, 3]
    e = math.exp(-0.5)
    expected = [[1, e, e**2, e**3], [1, 0, 0, 0], [0, 0, 0, 0], [1, e, e**2, 0]]
    weights = slot_weights(leading, 4, 2.0, 0).view(4, 4)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("ce_weight", "l1_weight", "chunk_rows"), [(0.1, 0.9, 5), (1.0, 0.0, 1), (0.0, 1.0, 1000)]
)
def test_equals_naive_twin_and_fp64(
    ce_weight: float, l1_weight: float, chunk_rows: int, softcap: float | None
) -> None:
    tensors = problem()
    options = {"ce_weight": ce_weight, "l1_weight": l1_weight, "softcap": softcap}
    ours, gradients = loss_and_grads(chunked_dspark_loss, tensors, **options, chunk_rows=chunk_rows)
    naive, _ = loss_and_grads(naive_dspark_loss, tensors, **options)
    truth, true_gradients = loss_and_grads(naive_dspark_loss, exact(tensors), **options)
    for found, expected in zip(ours[:4], truth[:4], strict=True):
        assert relative_error(found, expected) < 1e-6
    for gradient, expected in zip(gradients, true_gradients, strict=True):
        assert relative_error(gradient, expected) < 3e-6
    assert torch.equal(ours.predictions, naive.predictions)


def test_fp64_passes_gradcheck() -> None:
    hidden, latent, head, markov, labels, prices, teacher = problem(torch.float64, rows=5)
    small = (hidden[:, :3], latent[:, :2], markov[:7, :2])
    trained = tuple(t.clone().requires_grad_() for t in small)
    others = (labels % 7, prices, teacher[:, :3])
    for weights in ({"ce_weight": 0.0, "l1_weight": 1.0}, WEIGHTS):
        assert torch.autograd.gradcheck(
            lambda h, z, m, weights=weights: (
                chunked_dspark_loss(
                    h, z, head[:7, :3], m, *others, **weights, softcap=2.0, chunk_rows=3
                ).numerator
            ),
            trained,
        )


def test_two_tokens_by_hand() -> None:
    """Logits ln 3 and 0 by the head, ln 3 and ln 3 with the bias; the teacher says 3 to 1."""
    log3 = math.log(3.0)
    found, gradients = loss_and_grads(
        chunked_dspark_loss,
        [
            torch.tensor([[1.0]]),
            torch.tensor([[2.0]]),
            torch.tensor([[log3], [0.0]]),
            torch.tensor([[0.0], [log3 / 2]]),
            torch.tensor([1]),
            torch.tensor([2.0]),
            torch.tensor([[1.0]]),
        ],
    )
    # p = (1/2, 1/2), q = (3/4, 1/4): L1 is 1/2, a token of p is accepted 3 times in 4.
    assert float(found.cross_entropy) == pytest.approx(2 * math.log(2.0))
    assert float(found.distance) == pytest.approx(1.0)
    assert found.accept_rate.tolist() == pytest.approx([0.75])
    assert float(found.numerator.detach()) == pytest.approx(0.2 * math.log(2.0) + 0.9)
    # By the logits: CE p - (0, 1), L1 p (s - s p) = (-1/2, 1/2) with s = (-1, 1), s p = 0.
    of_logits = [2 * (0.1 * 0.5 - 0.9 * 0.5), 2 * (-0.1 * 0.5 + 0.9 * 0.5)]
    expected = [of_logits[0] * log3, of_logits[1] * log3 / 2]
    assert [float(g.sum()) for g in gradients[:2]] == pytest.approx([3 * x for x in expected])
    assert gradients[2].flatten().tolist() == pytest.approx([3 * 2 * x for x in of_logits])


def test_a_drafter_that_is_its_teacher_has_no_distance_and_no_gradient() -> None:
    tensors = problem()
    tensors[1], tensors[6] = torch.zeros_like(tensors[1]), tensors[0].clone()
    found, gradients = loss_and_grads(chunked_dspark_loss, tensors, ce_weight=0.0, l1_weight=1.0)
    assert found.distance == 0
    assert not any(gradient.any() for gradient in gradients)
    assert torch.equal(found.accept_rate, (tensors[5] > 0).float())


def test_distributions_without_a_common_token_are_never_accepted() -> None:
    """The distance reaches 2, and the rate 0, not less."""
    tensors = problem(rows=6)
    tensors[0], tensors[6] = 100 * tensors[0], -100 * tensors[0]
    found, _ = loss_and_grads(chunked_dspark_loss, tensors)
    assert found.accept_rate.abs().max() <= 1e-6
    assert (found.accept_rate >= 0).all()
    assert torch.isfinite(found.distance)


def test_confidence_learns_the_accept_rate_and_does_not_change_it() -> None:
    confidence = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    accept_rate = torch.tensor([0.25, 1.0, 0.5], requires_grad=True)
    weights = torch.tensor([1.0, 3.0, 0.0])
    loss = confidence_loss(confidence, accept_rate, weights)
    sigmoid = 1 / (1 + math.exp(-2.0))
    assert float(loss.detach()) == pytest.approx(math.log(2.0) - 3 * math.log(sigmoid))
    loss.backward()
    assert confidence.grad is not None
    expected = [0.5 - 0.25, 3 * (sigmoid - 1.0), 0.0]
    assert confidence.grad.tolist() == pytest.approx(expected)
    assert accept_rate.grad is None


def test_bf16_error_is_within_twice_the_naive_one() -> None:
    tensors = problem(torch.bfloat16)
    truth, true_gradients = loss_and_grads(naive_dspark_loss, exact(tensors))
    ours, gradients = loss_and_grads(chunked_dspark_loss, tensors, chunk_rows=6)
    naive, naive_gradients = loss_and_grads(naive_dspark_loss, tensors)
    assert ours.numerator.dtype == torch.float32
    bound = 2 * relative_error(naive.numerator, truth.numerator) + 1e-6
    assert relative_error(ours.numerator, truth.numerator) <= bound
    for gradient, twin, expected in zip(gradients, naive_gradients, true_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative_error(gradient, expected) <= 2 * relative_error(twin, expected)


def test_rows_of_weight_zero_are_ignored_whatever_they_hold() -> None:
    tensors = problem()
    expected, expected_gradients = loss_and_grads(chunked_dspark_loss, tensors)
    hidden, latent, _, _, labels, weights, teacher = tensors
    for rows in (hidden, latent, teacher):
        rows[weights == 0] = math.nan
    labels[weights == 0] = -100
    found, gradients = loss_and_grads(chunked_dspark_loss, tensors)
    assert torch.equal(found.numerator, expected.numerator)
    assert all(map(torch.equal, gradients, expected_gradients))
    for gradient in gradients[:2]:
        assert (gradient[weights == 0] == 0).all()
    assert (found.predictions[weights == 0] == IGNORED_PREDICTION).all()
    assert (found.predictions[weights > 0] >= 0).all()
    assert (found.accept_rate[weights == 0] == 0).all()


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_supervised_gives_zero_with_a_graph(rows: int) -> None:
    tensors = problem(rows=rows)
    tensors[5] = torch.zeros(rows)
    found, gradients = loss_and_grads(chunked_dspark_loss, tensors)
    assert found.numerator == 0
    assert not any(gradient.any() for gradient in gradients)


class WideTensors(TorchDispatchMode):
    """Most rows of a tensor as wide as the vocabulary."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                self.largest = max(self.largest, tensor.numel() // VOCAB)
        return out


def test_logits_exist_for_a_chunk_only() -> None:
    tensors = problem()
    for i in (0, 1, 2, 3, 6):  # the transposed matrices are as wide, but 2 rows
        tensors[i] = tensors[i][:, :2]
    with WideTensors() as chunked:
        loss_and_grads(chunked_dspark_loss, tensors, chunk_rows=4)
    with WideTensors() as naive:
        loss_and_grads(naive_dspark_loss, tensors)
    assert chunked.largest == 4
    assert naive.largest == int((tensors[5] > 0).sum())
