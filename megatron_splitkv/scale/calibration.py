"""Fit the constants to the paper's bars at P = 8, and to nothing else.

These bars run inside one node, so the fit does not depend on how the speed between nodes is read,
and every bar at P >= 16 is a prediction.
"""

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.scale.constants import READINGS, Constants
from megatron_splitkv.scale.methods import PAPER_METHODS
from megatron_splitkv.scale.paper import Bar, all_bars
from megatron_splitkv.scale.step import step_seconds

# Where the search begins; its end does not depend on it.
_START = Constants(200e12, 100e12, 1.2, 1e-11)


def fit(bars: Sequence[Bar] | None = None) -> Constants:
    """Least squares of log(predicted / measured) over the bars at P = 8.

    Args:
        bars: the paper's when None; those of more ranks are left out here.

    Raises:
        ConfigError: fewer bars than constants.
    """
    from scipy.optimize import least_squares

    used = [bar for bar in (all_bars() if bars is None else bars) if bar.calibrates]
    start = np.log(np.array(astuple(_START)))
    if len(used) < start.size:
        raise ConfigError(f"{len(used)} bars at P = 8 cannot fix {start.size} constants")
    drafters = {bar.model: DFlashConfig.preset(bar.model) for bar in used}
    links = next(iter(READINGS.values()))

    def residuals(logarithms: NDArray[np.float64]) -> list[float]:
        constants = Constants(*np.exp(logarithms).tolist())
        machine = constants.on(links)
        return [
            float(
                np.log(
                    step_seconds(
                        PAPER_METHODS[bar.method],
                        bar.workload,
                        drafters[bar.model],
                        machine,
                        constants,
                    ).total
                    / bar.seconds
                )
            )
            for bar in used
        ]

    return Constants(*np.exp(least_squares(residuals, start).x).tolist())
