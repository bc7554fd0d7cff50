"""Intervals over prompts: how much would the acceptance length move with other prompts?"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 10_000
_LEVEL = 0.95


class Interval(NamedTuple):
    """A two-sided 95 % interval."""

    low: float
    high: float


def bootstrap_ratios(
    tokens: NDArray[np.int64], steps: NDArray[np.int64], *, seed: int
) -> NDArray[np.float64]:
    """Acceptance lengths of resampled prompts: total tokens over total draft steps.

    Prompts are the independent draws, the steps of one prompt are not; so whole prompts are
    resampled, and every method sees the same resampled prompts: differences between rows of the
    result are paired.

    Args:
        tokens: produced tokens of each method on each prompt.
        steps: draft steps likewise; every prompt has at least one.
        seed: of the resampling.

    Shape:
        ``tokens``, ``steps`` ``[methods, prompts]``; the result ``[methods, resamples]``.
    """
    prompts = tokens.shape[1]
    generator = np.random.default_rng(seed)
    # How often each prompt was drawn: a matrix product instead of a gather per resample.
    drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES)
    return (tokens @ drawn.T) / (steps @ drawn.T)


def interval(samples: NDArray[np.float64]) -> Interval:
    """Percentile interval of bootstrap samples."""
    tail = 50 * (1 - _LEVEL)
    low, high = np.percentile(samples, [tail, 100 - tail])
    return Interval(float(low), float(high))
