"""Intervals over prompts."""

import numpy as np
import pytest
from scipy import stats

from megatron_splitkv.evaluate.bootstrap import bootstrap_ratios, interval


def test_agrees_with_scipys_bootstrap() -> None:
    generator = np.random.default_rng(0)
    steps = generator.integers(5, 40, size=24)
    tokens = steps + generator.integers(0, 90, size=24)

    def ratio(t: np.ndarray, s: np.ndarray, axis: int = -1) -> np.ndarray:
        return t.sum(axis=axis) / s.sum(axis=axis)

    expected = stats.bootstrap(
        (tokens, steps), ratio, paired=True, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    found = interval(bootstrap_ratios(tokens[None], steps[None], seed=2)[0])
    width = expected.high - expected.low
    assert found.low == pytest.approx(expected.low, abs=0.03 * width)
    assert found.high == pytest.approx(expected.high, abs=0.03 * width)


def test_weighs_prompts_by_their_draft_steps() -> None:
    """A long prompt of many steps counts more than a short one: no mean of means."""
    tokens, steps = np.array([[100, 4]]), np.array([[100, 1]])
    samples = bootstrap_ratios(tokens, steps, seed=0)[0]
    assert set(np.round(samples, 6)) == {1.0, round(104 / 101, 6), 4.0}


def test_differences_are_paired() -> None:
    generator = np.random.default_rng(3)
    steps = generator.integers(5, 40, size=12)
    tokens = steps * generator.integers(1, 9, size=12)
    # The second method earns exactly a half token more a step on every prompt.
    samples = bootstrap_ratios(
        np.stack([2 * tokens, 2 * tokens + steps]), np.stack([2 * steps] * 2), seed=0
    )
    spread = interval(samples[1] - samples[0])
    assert spread.low == pytest.approx(0.5)
    assert spread.high == pytest.approx(0.5)
    alone = interval(samples[0])
    assert alone.high - alone.low > 0.5
