"""Megatron's integer token count with fractional weights."""

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.loss import (
    FIXED_POINT_SCALE,
    MAX_TOKEN_COUNT,
    check_token_count,
    dpace_weights,
    fixed_point_loss,
)


def mean_loss(*packs: tuple[float, float]) -> float:
    """What Megatron divides, for packs of one process given as (mean loss, weight)."""
    parts = [
        fixed_point_loss(torch.tensor(mean * weight), torch.tensor([weight]))
        for mean, weight in packs
    ]
    count = sum(int(tokens) for _, tokens in parts)
    return sum(float(loss) for loss, _ in parts) / max(count, 1)


@pytest.mark.parametrize("weight", [1e-4, 0.3, 0.777, 1.0, 123.456, 54321.9])
def test_one_pack_is_exact_at_any_weight(weight: float) -> None:
    assert mean_loss((2.5, weight)) == pytest.approx(2.5, rel=1e-6)


def test_constant_scaling_would_be_wrong_below_one() -> None:
    weight = 0.303
    wrong = FIXED_POINT_SCALE * 2.5 * weight / round(FIXED_POINT_SCALE * weight)
    assert wrong != pytest.approx(2.5, rel=1e-3)


def test_packs_weigh_by_their_weight_within_the_stated_error() -> None:
    first, second = (2.0, 0.61), (5.0, 7.13)
    exact = (first[0] * first[1] + second[0] * second[1]) / (first[1] + second[1])
    bound = (5.0 - 2.0) / (2 * FIXED_POINT_SCALE * first[1])
    assert mean_loss(first, second) == pytest.approx(exact, abs=bound)


def test_a12_an_empty_pack_counts_zero_tokens_and_keeps_its_graph() -> None:
    numerator = torch.zeros((), requires_grad=True)
    loss, num_tokens = fixed_point_loss(numerator * 1.0, torch.zeros(8))
    assert num_tokens == 0
    assert num_tokens.dtype == torch.int32
    loss.backward()
    assert loss == 0
    assert numerator.grad is not None
    assert numerator.grad.isfinite()
    assert mean_loss((0.0, 0.0), (3.0, 1.7)) == pytest.approx(3.0, rel=1e-6)


def test_a_count_beyond_int32_is_refused_by_number() -> None:
    # Without decay a block of 2 weighs 1, so blocks are weights.
    fits = MAX_TOKEN_COUNT // FIXED_POINT_SCALE
    check_token_count(fits, block_size=2, gamma=7.0, packs_per_step=1)
    with pytest.raises(ConfigError, match=r"8,388,608.*8,388,608"):
        check_token_count(fits + 1, block_size=2, gamma=7.0, packs_per_step=1)
    with pytest.raises(ConfigError, match="1024 packs"):
        check_token_count(16384, block_size=16, gamma=7.0, packs_per_step=1024)


def test_dpace_counts_the_most_that_its_blocks_can_weigh() -> None:
    """Five trained slots that are surely right weigh 5 + 4 + 3 + 2 + 1."""
    fits = MAX_TOKEN_COUNT // FIXED_POINT_SCALE // 15
    options = {"block_size": 6, "gamma": 7.0, "packs_per_step": 1, "loss_weights": "dpace"}
    check_token_count(fits, **options)
    with pytest.raises(ConfigError, match="can weigh 8,388,615"):
        check_token_count(fits + 1, **options)
    sure = dpace_weights(torch.ones(1, 6), torch.arange(6)[None] > 0)
    assert sure.tolist() == [[0, 5, 4, 3, 2, 1]]


def test_noise_in_weights_moves_a_mean_no_further_than_itself() -> None:
    """D-PACE's weights differ in their last bits between layouts; a count may then differ by 1."""
    generator = torch.Generator().manual_seed(0)
    weights = 10 * torch.rand(200, 40, generator=generator)
    noise = 1e-6 * torch.randn(weights.shape, generator=generator)
    counts, means = [], []
    for perturbed in (weights, weights * (1 + noise)):
        packs = [(float(i), float(pack.sum())) for i, pack in enumerate(perturbed)]
        means.append(mean_loss(*packs))
        counts.append([int(fixed_point_loss(torch.zeros(()), pack)[1]) for pack in perturbed])
    assert counts[0] != counts[1]
    assert means[1] == pytest.approx(means[0], rel=1e-6)
