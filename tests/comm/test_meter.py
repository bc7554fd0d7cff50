"""The meter's arithmetic: the published convention, exact, per op and per label."""

import pytest
import torch

from megatron_splitkv.comm import Collective, CommMeter
from megatron_splitkv.comm.meter import record


def test_nothing_is_recorded_without_a_meter() -> None:
    meter = CommMeter()
    record("all_gather", "q", 12, torch.float32, 4)
    assert meter.records == []


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        ("all_gather", 9.0),
        ("all_gather_v", 12.0),
        ("all_to_all", 9.0),
        ("all_to_all_v", 12.0),
        ("all_reduce_max", 18.0),
        ("all_reduce_sum", 18.0),
        ("broadcast", 9.0),
        ("reduce_sum", 9.0),
        ("shift", 12.0),
    ],
)
def test_elements_sent_by_one_of_four_ranks(op: str, sent: float) -> None:
    with CommMeter() as meter:
        record(op, "x", 12, torch.bfloat16, 4)
    assert meter.records == [Collective(op, "x", sent, torch.bfloat16)]
    assert (meter.elements(), meter.bytes(), meter.calls()) == (sent, 2 * sent, 1)


def test_sums_by_op_and_label() -> None:
    with CommMeter() as meter:
        record("all_gather", "q", 8, torch.bfloat16, 2)
        record("all_gather", "delta", 2, torch.float32, 2)
        record("all_to_all", "out", 8, torch.bfloat16, 2)
    assert meter.elements(op="all_gather") == 5
    assert meter.bytes(op="all_gather") == 12
    assert meter.calls(label="out") == 1
    assert meter.bytes(op="all_gather", label="delta") == 4
    assert meter.calls(label="k") == 0


def _fail_within(meter: CommMeter) -> None:
    with meter:
        record("all_gather", "q", 4, torch.float32, 2)
        raise ZeroDivisionError


def test_nested_meters_each_see_their_region_even_after_an_error() -> None:
    with CommMeter() as outer:
        record("all_gather", "q", 4, torch.float32, 2)
        inner = CommMeter()
        with pytest.raises(ZeroDivisionError):
            _fail_within(inner)
        record("all_gather", "q", 4, torch.float32, 2)
    record("all_gather", "q", 4, torch.float32, 2)
    assert (outer.calls(), inner.calls()) == (3, 1)
