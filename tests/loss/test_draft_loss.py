"""Caps, D-PACE weights and distillation in the chunked loss, against naive twins and fp64."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_splitkv.loss import (
    IGNORED_PREDICTION,
    DraftLoss,
    chunked_draft_loss,
    dpace_weights,
    naive_dpace_weights,
    naive_draft_loss,
)
from megatron_splitkv.testing import relative_error

B, BLOCKS, HIDDEN, VOCAB = 4, 9, 24, 101
ROWS = B * BLOCKS
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 4.0},
    "dpace": {"dpace_block_size": B},
    "distillation": {"distillation_weight": 0.7},
    "only-distillation": {"distillation_weight": 1.0},
    "all": {"softcap": 4.0, "dpace_block_size": B, "distillation_weight": 0.3},
}


def problem(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = torch.rand(ROWS, generator=generator)
    weights[::B] = 0.0
    weights[[2, 5, 6, 7]] = 0.0  # a hole in a block, and a block without supervision
    return {
        "hidden": randn(ROWS, HIDDEN),
        "head_weight": randn(VOCAB, HIDDEN),
        "labels": torch.randint(VOCAB, (ROWS,), generator=generator),
        "weights": weights,
        "teacher_hidden": randn(ROWS, HIDDEN),
    }


def loss_and_grad(
    function: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], **more: Any
) -> tuple[DraftLoss, torch.Tensor]:
    inputs = dict(inputs)
    if "distillation_weight" not in options:
        del inputs["teacher_hidden"]
    hidden = inputs.pop("hidden").detach().clone().requires_grad_()
    found = function(hidden, **inputs, **options, **more)
    (3.0 * found.numerator).backward()
    assert hidden.grad is not None
    return found, hidden.grad


def doubled(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


@pytest.mark.parametrize("chunk_rows", [1, 9, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_naive_twin_and_fp64(options: dict[str, Any], chunk_rows: int) -> None:
    inputs = problem()
    found, grad = loss_and_grad(chunked_draft_loss, inputs, options, chunk_rows=chunk_rows)
    for expected, expected_grad in (
        loss_and_grad(naive_draft_loss, inputs, options),
        loss_and_grad(naive_draft_loss, doubled(inputs), options),
    ):
        assert relative_error(grad, expected_grad) < 1e-6
        assert relative_error(found.weights, expected.weights) < 1e-6
        assert relative_error(found.numerator, expected.numerator) < 1e-6
        assert relative_error(found.divergence, expected.divergence) < 1e-6
        assert torch.equal(found.predictions, expected.predictions)
    assert found.numerator.dtype == found.weights.dtype == torch.float32


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fp64_passes_gradcheck(options: dict[str, Any]) -> None:
    inputs = doubled(problem())
    hidden = inputs.pop("hidden")[:B].requires_grad_()
    head, rest = inputs.pop("head_weight"), {n: x[:B] for n, x in inputs.items()}
    if "dpace_block_size" in options:  # its weights carry no gradient: hold them fixed
        with torch.no_grad():
            rest["weights"] = chunked_draft_loss(hidden, head, **rest, **options).weights
        options = {name: x for name, x in options.items() if name != "dpace_block_size"}
    assert torch.autograd.gradcheck(
        lambda x: chunked_draft_loss(x, head, **rest, **options, chunk_rows=3).numerator, (hidden,)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bf16_error_is_within_twice_the_naive_one(options: dict[str, Any]) -> None:
    inputs = problem(torch.bfloat16)
    true, true_grad = loss_and_grad(naive_draft_loss, doubled(inputs), options)
    ours, grad = loss_and_grad(chunked_draft_loss, inputs, options)
    naive, naive_grad = loss_and_grad(naive_draft_loss, inputs, options)
    bound = 2 * relative_error(naive.numerator, true.numerator) + 1e-4
    assert relative_error(ours.numerator, true.numerator) <= bound
    assert relative_error(grad, true_grad) <= 2 * relative_error(naive_grad, true_grad)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_weight_zero_are_ignored_whatever_they_hold(options: dict[str, Any]) -> None:
    inputs = problem()
    expected, expected_grad = loss_and_grad(chunked_draft_loss, inputs, options)
    idle = inputs["weights"] == 0
    for name in ("hidden", "teacher_hidden"):
        inputs[name] = inputs[name].masked_fill(idle[:, None], math.nan)
    inputs["labels"] = inputs["labels"].masked_fill(idle, -100)
    found, grad = loss_and_grad(chunked_draft_loss, inputs, options)
    assert torch.equal(found.numerator, expected.numerator)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(grad, expected_grad)
    assert (grad[idle] == 0).all()
    assert (found.predictions[idle] == IGNORED_PREDICTION).all()


@pytest.mark.parametrize("rows", [0, B])
def test_nothing_supervised_gives_zero_with_a_graph(rows: int) -> None:
    inputs = {name: x if name == "head_weight" else x[:rows] for name, x in problem().items()}
    inputs["weights"] = torch.zeros(rows)
    found, grad = loss_and_grad(chunked_draft_loss, inputs, OPTIONS["all"])
    assert found.numerator == found.divergence == found.weights.sum() == 0
    assert torch.equal(grad, torch.zeros(rows, HIDDEN))


def test_dpace_weights_of_a_small_block_are_the_sums_that_define_them() -> None:
    """Confidences 1, 0, 0.5 are drawn to 1, 0.5, 0.75; the products are 1, 0.5, 0.375."""
    confidence = torch.tensor([[9.0, 1.0, 0.0, 0.5]])
    supervised = torch.tensor([[False, True, True, True]])
    expected = torch.tensor([[0.0, 1.875, 0.875, 0.375]])
    assert torch.equal(dpace_weights(confidence, supervised), expected)
    assert torch.equal(naive_dpace_weights(confidence, supervised), expected)


def test_a_slot_without_supervision_is_passed_over() -> None:
    confidence = torch.tensor([[1.0, 0.0, math.nan, 0.5], [math.nan] * 4])
    supervised = torch.tensor([[True, True, False, True], [False] * 4])
    weights = dpace_weights(confidence, supervised)
    assert weights.tolist() == [[1.875, 0.875, 0.0, 0.375], [0.0] * 4]


def test_dpace_is_the_gradient_of_the_expected_acceptance() -> None:
    """Without smoothing: sum over m of the product of q_1 .. q_m, differentiated by log q."""
    log_q = -torch.rand(3, B, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    log_q.requires_grad_()
    log_q.exp().cumprod(dim=1).sum().backward()
    everything = torch.ones(3, B, dtype=torch.bool)
    weights = dpace_weights(log_q.exp(), everything, smoothing=0.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, log_q.grad)


def test_a_cap_that_no_logit_reaches_changes_nothing_and_a_low_one_holds_the_logits() -> None:
    inputs = problem(torch.float64)
    del inputs["teacher_hidden"]
    plain = naive_draft_loss(**inputs).numerator
    far = chunked_draft_loss(**inputs, softcap=1e6).numerator
    assert float(far) == pytest.approx(float(plain), rel=1e-9)
    # Logits of at most 1e-3 are as good as equal: the entropy of the uniform distribution.
    near = chunked_draft_loss(**inputs, softcap=1e-3).numerator
    uniform = math.log(VOCAB) * float(inputs["weights"].sum())
    assert float(near) == pytest.approx(uniform, rel=1e-3)


def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn_from_it() -> None:
    inputs = problem(torch.float64)
    inputs["hidden"] = inputs["teacher_hidden"].clone()
    found, grad = loss_and_grad(chunked_draft_loss, inputs, OPTIONS["only-distillation"])
    assert found.numerator.detach().abs() < 1e-12
    assert grad.abs().max() < 1e-12


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary that an operation returned."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_never_exist_for_more_rows_than_a_chunk(options: dict[str, Any]) -> None:
    inputs = {n: x[:, :2] if x.dim() == 2 else x for n, x in problem().items()}
    with LargestLogits() as chunked:
        loss_and_grad(chunked_draft_loss, inputs, options, chunk_rows=2 * B)
    # Two blocks, of which slots 0 are never projected, where D-PACE keeps blocks together.
    assert chunked.rows == (2 * (B - 1) if "dpace_block_size" in options else 2 * B)
