"""The constants come from P = 8 alone, and anybody can compute them again."""

from dataclasses import asdict, replace

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.scale import FITTED, fit
from megatron_splitkv.scale.paper import all_bars


def test_frozen_constants_are_a_fresh_fit() -> None:
    assert asdict(fit()) == pytest.approx(asdict(FITTED), rel=2e-3)


def test_held_out_bars_do_not_move_the_constants() -> None:
    bars = [
        bar if bar.calibrates else replace(bar, seconds=100 * bar.seconds) for bar in all_bars()
    ]
    assert fit(bars) == fit([bar for bar in bars if bar.calibrates])
    assert asdict(fit(bars)) == pytest.approx(asdict(FITTED), rel=2e-3)


def test_calibrating_bars_do() -> None:
    bars = [replace(bar, seconds=2 * bar.seconds) for bar in all_bars() if bar.calibrates]
    fresh = fit(bars)
    assert fresh.dense_flops < 0.8 * FITTED.dense_flops
    assert fresh.attention_flops < 0.8 * FITTED.attention_flops


def test_too_few_bars() -> None:
    with pytest.raises(ConfigError, match="3 bars at P = 8 cannot fix 4 constants"):
        fit([bar for bar in all_bars() if bar.calibrates][:3])
