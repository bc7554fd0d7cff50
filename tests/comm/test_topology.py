"""Which ranks share a node, and that two-level returns are the sums of one level."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    CommMeter,
    Routes,
    RowExchange,
    pending_sum,
    ranks_on_node,
)
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.comm.topology import (
    launched_ranks_per_node,
    links_of_launch,
    split_by_node,
)
from megatron_splitkv.testing import gloo_pool, subgroup


@pytest.mark.parametrize(
    ("ranks", "per_node", "expected"),
    [
        (range(4), 2, 2),
        (range(6), 3, 3),
        (range(0, 16, 2), 8, 4),  # tensor parallelism 2
        (range(8, 16), 4, 4),
        (range(4), 4, 1),  # one node
        (range(4), 1, 1),
        (range(0, 16, 4), 4, 1),  # one rank a node
        (range(6), 4, 1),  # four and two
        (range(4, 12), 6, 1),  # two and six
        ([0, 4, 1, 5], 4, 1),  # a node twice
        ([0, 1, 4, 5, 2, 3, 6, 7], 4, 1),
    ],
)
def test_nodes_by_hand(ranks: Any, per_node: int, expected: int) -> None:
    assert split_by_node(list(ranks), per_node) == expected


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "14"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "4"}, 4),
        # 8 and 4 ranks: the smaller node's size divides 12, and both must come to the same end.
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 1),
    ],
)
def test_the_launcher_says_how_many_ranks_a_node_has(
    environment: dict[str, str], ranks: int
) -> None:
    with mock.patch.dict("os.environ", environment, clear=True):
        assert launched_ranks_per_node() == ranks


def test_links_have_the_nodes_of_the_launch() -> None:
    """What is estimated and what is run must not have nodes of different sizes."""
    preset = PRESETS["nvlink-400g"]
    two_nodes = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    with mock.patch.dict("os.environ", two_nodes, clear=True):
        launched = links_of_launch(preset)
        assert launched.ranks_per_node == launched_ranks_per_node() == 4
        assert launched.node_bandwidth == preset.node_bandwidth  # its cards stay
        assert links_of_launch(preset, 1) == launched  # one level, over the same nodes
        assert links_of_launch(preset, 2).ranks_per_node == 2  # the user knows better
    with mock.patch.dict("os.environ", clear=True):
        assert links_of_launch(preset) is preset
        assert links_of_launch(preset, 2).ranks_per_node == 2


def _counts() -> list[int] | None:
    group = subgroup(range(6))
    if dist.get_rank() >= 6:
        return None
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        launched = ranks_on_node(group)
    return [launched, *(ranks_on_node(group, n) for n in (None, 1, 2, 3, 4, 6))]


def test_a_group_of_six() -> None:
    assert gloo_pool(8).run(_counts)[:6] == [[2, 1, 1, 2, 3, 1, 1]] * 6  # None: all on one machine
    assert ranks_on_node(None, 2) == 1


def _sums(size: int, per_node: int, dtype: torch.dtype, rows: int) -> list[torch.Tensor] | None:
    group, rank = subgroup(range(size)), dist.get_rank()
    if rank >= size:
        return None
    flat, levels = RowExchange(group, rows), RowExchange(group, rows, node_ranks=per_node)
    assert flat.levels == (flat,)
    none = torch.arange(0)
    routed = RowExchange(group, rows, Routes(none, [], [], none), node_ranks=per_node)
    assert routed.levels == (routed,)
    assert [x.own_rows for x in levels.levels] == [size // per_node * rows, rows]
    assert (levels.attended_rows, levels.own_attended) == (flat.attended_rows, flat.own_attended)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-9, 9, (size * rows, 3, 2), generator=generator).to(dtype)
    x = x.transpose(1, 2)  # not contiguous
    kept = x.clone()
    sums = [
        e.launch_sum(x, label="x", wire_dtype=dtype, dtype=torch.float64) for e in (flat, levels)
    ]
    results = [pending.wait() for pending in sums]
    assert sums[1].wait() is results[1]
    assert torch.equal(x, kept)
    return [*results, levels.launch_cast(x[:rows], label="x").wait()]


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_two_levels_sum_what_one_does(size: int, per_node: int, rows: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):  # small integers: every sum is exact
        for one, two, cast in gloo_pool(8).run(_sums, size, per_node, dtype, rows)[:size]:
            assert two.shape == (rows, 2, 3)
            assert two.dtype == torch.float64
            assert torch.equal(one, two)
            assert cast.shape[0] == size * rows


def _sum_of_large_and_small() -> torch.Tensor | None:
    group, rank = subgroup(range(4)), dist.get_rank()
    if rank >= 4:
        return None
    exchange = RowExchange(group, 1, node_ranks=2)
    # bf16 holds each share and 260, but not 257: the first pair adds up in fp32 and is rounded once
    share = torch.full((4, 1), [256.0, 4.0, 1.0, 2.0][rank], dtype=torch.bfloat16)
    pending = exchange.launch_sum(share, label="x", wire_dtype=torch.bfloat16, dtype=torch.float32)
    return pending.wait()


def test_sums_are_fp32_and_travel_in_the_wire_dtype() -> None:
    assert [x.tolist() for x in gloo_pool(8).run(_sum_of_large_and_small)[:4]] == [[[263.0]]] * 4


def _events() -> list[Any] | None:
    group = subgroup(range(6))
    if dist.get_rank() >= 6:
        return None
    exchange = RowExchange(group, 2, node_ranks=3)
    dtype = torch.float32
    with CommMeter() as meter:
        pending = exchange.launch_sum(
            torch.zeros(12, 5), label="x", wire_dtype=torch.bfloat16, dtype=dtype
        )
        launched = list(meter.events)
        pending.wait()
    return [launched, meter.events, [(r.op, r.elements, r.dtype) for r in meter.records]]


def test_what_each_level_sends_and_when() -> None:
    for launched, events, records in gloo_pool(8).run(_events)[:6]:
        assert launched == [("launch", "x")]
        assert events == [("launch", "x"), ("wait", "x")] * 2
        assert records == [
            ("all_to_all_inside", 2 * 2 * (3 - 1) * 5, torch.bfloat16),  # n R (g - 1) rows
            ("all_to_all_between", 2 * (2 - 1) * 5, torch.bfloat16),  # R (n - 1) rows
        ]


class _Stream:
    """Stands for a CUDA stream: notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *exception: object) -> None:
        self.log.append(f"off {self.name}")


def _order_on_a_gpu() -> list[Any] | None:
    group, rank = subgroup(range(4)), dist.get_rank()
    if rank >= 4:
        return None
    log: list[str] = []
    side, main = _Stream("side", log), _Stream("main", log)
    exchange = RowExchange(group, 2, node_ranks=2)
    with (
        mock.patch.object(pending_sum, "_side_stream", return_value=side),
        mock.patch.object(torch.cuda, "stream", lambda stream: stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=main),
        mock.patch.object(
            torch.Tensor,
            "record_stream",
            lambda x, stream: log.append(f"{stream.name} uses {x.shape[0]} rows"),
        ),
        CommMeter() as meter,
    ):
        pending = exchange.launch_sum(
            torch.ones(8, 1), label="x", wire_dtype=torch.float32, dtype=torch.float32
        )
        launched = [*log, *meter.events]
        log.clear()
        meter.clear()
        total = pending.wait()
        return [launched, [*log, *meter.events], total.tolist()]


def test_on_a_gpu_both_levels_are_enqueued_at_once() -> None:
    for launched, waited, total in gloo_pool(8).run(_order_on_a_gpu)[:4]:
        assert launched == [
            # The allocator hears of the side stream before any reference to them is dropped.
            *("side uses 8 rows", "side uses 8 rows"),
            *("on side", "off side", "side records"),
            *[("launch", "x"), ("wait", "x")] * 2,
        ]
        assert waited == ["main waits for event of side", "main uses 2 rows"]
        assert total == [[4.0], [4.0]]
