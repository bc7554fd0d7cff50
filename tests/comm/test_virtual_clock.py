"""The virtual clock: schedules computed by hand, first from scripts, then from gloo ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    CommMeter,
    all_reduce_max,
    launch_gather_rows,
    launch_shift,
    mark,
)
from megatron_splitkv.comm.links import Links
from megatron_splitkv.comm.meter import record
from megatron_splitkv.comm.virtual_clock import (
    Moment,
    Schedule,
    VirtualClock,
    replay,
    transfer_seconds,
)
from megatron_splitkv.testing import gloo_pool, subgroup


def one_node(latency: float, bandwidth: float) -> Links:
    return Links("test", latency, bandwidth, latency, bandwidth, 1, 64, 1.0, 1.0)


# A second per message and a byte per second.
LINKS = one_node(1.0, 1.0)
Script = Sequence[tuple[Any, ...]]


def play(ranks: int, *script: tuple[Any, ...]) -> list[Moment]:
    """Moments of one rank: ``(compute, s)``, ``(launch, op, bytes[, label])``, ``(block, op,
    bytes)``, ``(wait[, label])``, ``(phase, name)``."""
    seconds = [0.0]
    with VirtualClock(now=lambda: seconds[0]) as clock:
        for step, *arguments in script:
            if step == "compute":
                seconds[0] += arguments[0]
            elif step == "phase":
                mark("phase", arguments[0])
            elif step == "wait":
                mark("wait", arguments[0] if arguments else "x")
            else:
                op, nbytes, *label = arguments
                name = label[0] if label else "x"
                record(op, name, nbytes, torch.uint8, ranks)
                if step == "launch":
                    mark("launch", name)
    return clock.moments


def schedule(*scripts: Script, links: Links = LINKS, **arguments: Any) -> Schedule:
    return replay([play(len(scripts), *s) for s in scripts], links, **arguments)


# All-gather of 4 bytes on 2 ranks: one message of half of it, 1 + 2 seconds.
GATHER = ("launch", "all_gather", 4)


@pytest.mark.parametrize(("compute", "total"), [(1.0, 3.0), (3.0, 3.0), (5.0, 5.0)])
def test_overlap_hides_the_shorter_of_computation_and_communication(
    compute: float, total: float
) -> None:
    both = schedule(*[[GATHER, ("compute", compute), ("wait",)]] * 2)
    assert both.seconds == total
    assert both.spent(0, "compute") == compute
    assert both.spent(0, "wait", "x") == total - compute
    serial = schedule(*[[GATHER, ("wait",), ("compute", compute)]] * 2)
    assert serial.seconds == 3.0 + compute


def test_transfers_of_a_rank_follow_one_another() -> None:
    script = [GATHER, ("launch", "all_to_all", 8, "y"), ("wait",), ("compute", 1.0), ("wait", "y")]
    both = schedule(script, script)
    assert both.spans[0][0].end == 3.0
    assert (
        both.seconds == 3.0 + 5.0
    )  # the second message, 1 + 4 seconds, begins when the first is gone


def test_all_wait_for_the_slowest_rank() -> None:
    scripts = [[("compute", late), GATHER, ("wait",), ("compute", 1.0)] for late in (0.0, 7.0)]
    both = schedule(*scripts)
    assert both.seconds == 7.0 + 3.0 + 1.0
    assert (both.spent(0, "wait"), both.spent(1, "wait")) == (10.0, 3.0)


def test_a_blocking_collective_needs_no_wait() -> None:
    scripts = [[("compute", late), ("block", "all_reduce_max", 4)] for late in (2.0, 0.0)]
    both = schedule(*scripts)
    assert both.seconds == 2.0 + LINKS.all_reduce_seconds(4, 2)
    assert [span.kind for span in both.spans[1]] == ["wait"]


def test_a_shift_concerns_neighbours_alone() -> None:
    # Ranks 0 -> 1 -> 2 -> 0 send 1, 5, 2 bytes; rank 2 is late by 10 seconds.
    scripts = [
        [("compute", late), ("launch", "shift", nbytes), ("wait",)]
        for late, nbytes in ((0.0, 1), (0.0, 5), (10.0, 2))
    ]
    three = schedule(*scripts)
    # 0 -> 1 ends at 2; 1 -> 2 at 10 + 6; 2 -> 0 at 10 + 3.
    assert [spans[-1].end for spans in three.spans] == [13.0, 16.0, 16.0]


def test_serial_hops_of_a_ring_add_up_and_hide_behind_what_is_computed_meanwhile() -> None:
    hop = [("launch", "shift", 3), ("compute", 1.0), ("wait",)]
    assert schedule(*[hop * 3] * 4).seconds == 3 * 4.0
    busy = [("launch", "shift", 3), ("compute", 6.0), ("wait",)]
    assert schedule(*[busy * 3] * 4).seconds == 3 * 6.0
    # One slow meeting a hop, another rank each time: balanced sums, and yet all wait every hop.
    slow = [
        [
            step
            for turn in range(4)
            for step in (("compute", 9.0 if turn == rank else 0.0), GATHER, ("wait",))
        ]
        for rank in range(4)
    ]
    assert schedule(*slow).seconds == 4 * (9.0 + LINKS.all_gather_seconds(4, 4))


def test_labels_tell_transfers_apart_and_are_waited_for_in_order() -> None:
    script = [GATHER, ("launch", "all_gather", 4, "y"), ("wait", "y"), ("wait",)]
    assert schedule(script, script).spans[0][0].label == "y"
    twice = [GATHER, GATHER, ("wait",), ("compute", 1.0), ("wait",)]
    assert [span.end for span in schedule(twice, twice).spans[0]] == [3.0, 4.0, 6.0]


def test_slower_links_larger_messages_and_phases_without_time() -> None:
    script = [
        ("phase", "projection"),
        ("compute", 2.0),
        ("phase", "attention"),
        GATHER,
        ("compute", 1.0),
        ("wait",),
    ]
    both = [script, script]
    assert schedule(*both).seconds == 2.0 + 3.0
    assert schedule(*both, slowdown=10.0).seconds == 2.0 + 30.0
    assert schedule(*both, bytes_factor=4.0).seconds == 2.0 + 1.0 + 8.0
    assert schedule(*both, slowdown=0.0).seconds == 3.0
    assert schedule(*both, pace={"projection": 0.0}).seconds == 3.0
    assert schedule(*both, pace={"projection": 3.0}).seconds == 6.0 + 3.0
    assert schedule(*both).spent(0, "compute", "projection") == 2.0


def test_ranks_that_do_different_things_are_refused() -> None:
    with pytest.raises(ValueError, match="different collectives"):
        schedule([GATHER, ("wait",)], [("launch", "all_to_all", 4), ("wait",)])
    with pytest.raises(ValueError, match="different collectives"):
        schedule([GATHER, ("wait",)], [])
    with pytest.raises(ValueError, match="waits for 'x', never launched"):
        schedule([("wait",)], [])


TWO_LEVELS = Links("two", 2.0, 8.0, 5.0, 4.0, 1, 2, 1.0, 1.0)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_gather", TWO_LEVELS.all_gather_seconds(48, 4)),
        ("all_to_all", TWO_LEVELS.all_to_all_seconds(48, 4)),
        ("all_reduce_max", TWO_LEVELS.all_reduce_seconds(48, 4)),
        ("all_reduce_sum", TWO_LEVELS.all_reduce_seconds(48, 4)),
        ("broadcast", TWO_LEVELS.broadcast_seconds(48, 4)),
        ("reduce_sum", TWO_LEVELS.broadcast_seconds(48, 4)),
    ],
)
def test_seconds_are_those_of_the_links_for_the_whole_buffer(op: str, expected: float) -> None:
    with CommMeter() as meter:
        record(op, "x", 48, torch.uint8, 4)
    assert transfer_seconds(TWO_LEVELS, op, [meter.bytes()] * 4) == pytest.approx(
        expected, rel=1e-12
    )


def test_uneven_transfers_last_as_long_as_their_busiest_rank() -> None:
    # A rank that sends 36 bytes to three others holds a part of 12, or a quarter of 48.
    sent = [36.0, 0.0, 3.0, 9.0]
    everyone = TWO_LEVELS.all_to_all_seconds(48, 4)
    assert transfer_seconds(TWO_LEVELS, "all_to_all_v", sent) == pytest.approx(everyone)
    assert transfer_seconds(TWO_LEVELS, "all_gather_v", sent) == pytest.approx(everyone)
    assert everyone != pytest.approx(TWO_LEVELS.all_gather_seconds(48, 4))
    assert transfer_seconds(TWO_LEVELS, "all_to_all_v", [0.0] * 4) == 0.0
    with pytest.raises(ValueError, match="shift has no price"):
        transfer_seconds(TWO_LEVELS, "shift", sent)


def test_levels_of_a_return_go_over_their_own_links() -> None:
    links = TWO_LEVELS
    assert links.nodes(4) == links.ranks_in_node(4) == 2
    inside = links.intra_latency + 36 / links.intra_bandwidth
    between = links.inter_latency + 36 / links.inter_bandwidth
    sent = [36.0, 0.0, 3.0, 9.0]
    assert transfer_seconds(links, "all_to_all_inside", sent) == pytest.approx(inside)
    assert transfer_seconds(links, "all_to_all_between", sent) == pytest.approx(between)
    assert inside != between


# On gloo ranks, with seconds of computation that the test chooses


def attend_something(cp_size: int) -> tuple[list[Moment], float, int] | None:
    """Overlapped gather, blocking reduction, ring hop, on ranks that compute differently long."""
    group = subgroup(range(cp_size))
    if dist.get_rank() >= cp_size:
        return None
    rank, seconds = dist.get_rank(), [100.0 * dist.get_rank()]  # clocks need not agree
    rows = torch.zeros(2, dtype=torch.uint8)
    with VirtualClock(now=lambda: seconds[0]) as clock:
        seconds[0] += rank  # the last rank is the slowest
        pending = launch_gather_rows(rows, group, label="q")
        seconds[0] += 2.0
        pending.wait()
        seconds[0] += 1.0
        all_reduce_max(rows, group, label="lse_max")
        pending = launch_shift(rows, group, label="k", received_rows=2)
        seconds[0] += 0.5
        pending.wait()
    launch_gather_rows(rows, group, label="q").wait()  # nobody notes this
    return clock.moments, clock.bytes(), clock.calls()


@pytest.mark.parametrize("cp_size", [2, 3])
def test_schedule_of_real_collectives(cp_size: int) -> None:
    answers = [a for a in gloo_pool(4).run(attend_something, cp_size) if a is not None]
    assert len(answers) == cp_size
    moments, sent, calls = zip(*answers, strict=True)
    assert set(calls) == {3}
    share = (cp_size - 1) / cp_size
    assert sent[0] == pytest.approx(2 * cp_size * share + 2 * 2 * share + 2)
    found = replay(moments, LINKS)
    slowest = cp_size - 1
    gathered = max(slowest + LINKS.all_gather_seconds(2 * cp_size, cp_size), slowest + 2.0)
    reduced = gathered + 1.0 + LINKS.all_reduce_seconds(2, cp_size)
    hopped = reduced + max(0.5, LINKS.ring_hop_seconds(2, cp_size))
    assert found.seconds == pytest.approx(hopped)
    for rank in range(cp_size):
        assert found.spent(rank, "compute") == pytest.approx(rank + 3.5)
        assert found.spent(rank, "wait") == pytest.approx(hopped - rank - 3.5)
    # Links that take no time leave what the slowest rank computes.
    assert replay(moments, LINKS, slowdown=0.0).seconds == pytest.approx(slowest + 3.5)
