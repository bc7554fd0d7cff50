"""Errors, orders and sensitivity: arithmetic on made-up times, and what the model must keep."""

import pytest

from megatron_splitkv.scale import FITTED, READINGS, StepTime
from megatron_splitkv.scale.comparison import (
    Prediction,
    error_table,
    order_of_methods,
    predict,
    sensitivity,
    summarise,
)
from megatron_splitkv.scale.paper import Bar, all_bars

NODE, RANK = READINGS.values()


def made_up(method: str, measured: float, modelled: float, x: int = 16) -> Prediction:
    bar = Bar("strong", "qwen3.5-27b", method, x, measured)
    return Prediction(bar, StepTime(modelled, 0, 0, 0, 0))


def test_summary_by_hand() -> None:
    summary = summarise([made_up("a2a", 2.0, 2.2), made_up("a2a", 4.0, 3.0)])
    assert (summary.bars, summary.within_15) == (2, 1)
    assert summary.mean == pytest.approx(0.175)
    assert summary.worst == pytest.approx(-0.25)


def test_only_held_out_bars_count() -> None:
    table = error_table([made_up("a2a", 1.0, 9.0, x=8), made_up("a2a", 1.0, 1.1)])
    assert table["a2a", "all"].bars == 1
    assert table["a2a", "strong"].worst == pytest.approx(0.1)
    assert ("a2a", "weak") not in table
    assert order_of_methods([made_up("a2a", 1.0, 2.0, x=8)]).places == 0


def test_order_by_hand() -> None:
    order = order_of_methods(
        [made_up("splitkv", 1.0, 1.0), made_up("a2a", 2.0, 4.0), made_up("p2p", 3.0, 3.0)]
    )
    assert (order.places, order.exact, order.pairs, order.right, order.fastest) == (1, 0, 3, 2, 1)
    assert order.wrong == (
        "strong qwen3.5-27b at 16: a2a 2.00 < p2p 3.00 s measured, 4.00 > 3.00 s modelled",
    )


def test_a_tie_is_right_either_way() -> None:
    order = order_of_methods([made_up("splitkv", 1.0, 1.2), made_up("a2a", 1.0, 1.1)])
    assert (order.exact, order.right, order.fastest) == (1, 1, 1)


def test_what_the_model_must_keep() -> None:
    """On the reading that fits: Split-KV's bars close, the fastest method nearly always right."""
    predictions = predict(FITTED.on(NODE), FITTED)
    errors = error_table(predictions)
    assert errors["splitkv", "all"].mean < 0.10
    assert abs(errors["splitkv", "all"].worst) < 0.20
    assert abs(errors["splitkv", "weak"].worst) < 0.15
    assert abs(errors["splitkv", "strong"].worst) < 0.15
    assert errors["a2a", "all"].mean < 0.10
    order = order_of_methods(predictions)
    assert (order.places, order.pairs) == (20, 184)
    assert order.right >= 165
    assert order.fastest >= 18


def test_the_other_reading_fits_worse() -> None:
    node, rank = (error_table(predict(FITTED.on(links), FITTED)) for links in (NODE, RANK))
    for method in ("splitkv", "a2a", "ringx"):
        assert rank[method, "all"].mean > 2 * node[method, "all"].mean


def test_the_reading_does_not_touch_what_calibrates() -> None:
    bars = [bar for bar in all_bars() if bar.calibrates]
    node, rank = (predict(FITTED.on(links), FITTED, bars) for links in (NODE, RANK))
    assert [p.error for p in node] == [p.error for p in rank]


def test_sensitivity_moves_one_number_at_a_time() -> None:
    bars = [b for b in all_bars() if b.setting == "strong" and b.model == "qwen3.5-27b"]
    table = sensitivity(NODE, FITTED, bars)
    assert len(table) == 1 + 2 * 6
    fitted = table["as fitted"]
    assert table["hop_slowdown x 1.2"][1] == fitted[1]  # Split-KV has no hops
    assert table["hop_slowdown x 1.2"][2] != fitted[2]
    assert table["nic_bandwidth x 0.8"][1] != fitted[1]
