"""`splitkv bench step`: bytes by the formulas, the same data for all, its files and refusals."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_splitkv.bench import step as step_module
from megatron_splitkv.bench import step_rank
from megatron_splitkv.bench.ranks import Ranks
from megatron_splitkv.bench.step import StepBenchmark, bench_step
from megatron_splitkv.bench.step_auto import choose_auto, standing_links
from megatron_splitkv.bench.step_rank import RankStep
from megatron_splitkv.bench.step_report import draw_steps, print_steps
from megatron_splitkv.bench.step_shape import (
    PEERS,
    SPLITKV,
    Method,
    StepShape,
    context_flops,
    imbalance,
    repeated_flops,
)
from megatron_splitkv.bench.step_time import Injection, small_nodes
from megatron_splitkv.cli import main
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.comm.meter import Collective
from megatron_splitkv.comm.virtual_clock import Moment
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from megatron_splitkv.testing import gloo_pool

SHAPE = StepShape(context=2000, queries=64, ranks_per_node=2)  # Q:S 1:31
SHORT = replace(SHAPE, context=250)  # 1:4, with uneven shards
LINKS = small_nodes(PRESETS["nvlink-400g"], 2)


class SharedRanks:
    """Ranks of the test session, which have imported Megatron once, as those of a benchmark."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return gloo_pool(self.world_size).run(fn, *args)

    def close(self) -> None:
        self.run(leave_megatron)


def leave_megatron() -> None:
    """As the ranks were, for the tests that use them next."""
    from megatron.core import parallel_state

    for cache in (step_rank._attention, step_rank._context_projection):
        cache.cache_clear()
    parallel_state.destroy_model_parallel()
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="module")
def result() -> StepBenchmark:
    """On four gloo ranks; two are launched below."""

    def open_shared(world_size: int) -> Ranks:
        return SharedRanks(world_size)

    with mock.patch.object(step_module, "open_ranks", open_shared):
        return bench_step([SHORT, SHAPE], ranks=(4,), links=LINKS, repeats=1)


def test_bytes_and_calls_are_those_of_the_formulas(result: StepBenchmark) -> None:
    for point in result.points:
        assert {run.method.strategy for run in point.runs.values()} == set(CP_COMM_TYPES)
        for name, run in point.runs.items():
            assert run.bytes == pytest.approx(run.formula_bytes, rel=1e-12), name
            assert min(run.bytes) > 0
            assert run.calls == run.formula_calls, name
            assert run.as_formula


def test_only_query_bound_strategies_send_the_same_over_eight_times_the_context(
    result: StepBenchmark,
) -> None:
    short, long = result.points
    plan = SHORT.plan(PEERS[0], 4)
    assert len({plan.num_rows(rank) for rank in range(4)}) > 1
    assert 8 * short.shape.context == long.shape.context
    assert short.runs.keys() == long.runs.keys()
    for name, run in long.runs.items():
        growth = np.sum(run.bytes) / np.sum(short.runs[name].bytes)
        if run.method.strategy in ("splitkv", "lv_xattn"):
            assert growth == 1
        else:
            assert growth > 2, name


def test_splitkv_sends_the_least_and_all_methods_compute_the_same(result: StepBenchmark) -> None:
    for point in result.points:
        for name, run in point.runs.items():
            assert run.difference < 0.02, name  # bf16
            if run.method.strategy != "splitkv" and point.shape == SHAPE:
                assert np.mean(run.bytes) > np.mean(point.ours.bytes), name


def test_what_it_says(result: StepBenchmark, tmp_path: Path) -> None:
    said = json.loads(json.dumps(result.to_json()))
    assert len(said["points"]) == 2
    for point in result.points:
        assert point.injection is not None
        for run in point.runs.values():
            assert (run.attention >= 0).all()
            assert run.attention.shape == run.whole.shape == (1, 3)
            assert (run.seconds(whole=True) > run.seconds()).all()
            assert len(run.peak_bytes) == run.cpu_seconds.shape[1] == point.cp_size
            assert min(run.peak_bytes) > 0
    ours = said["points"][-1]["methods"][said["points"][-1]["splitkv"]]
    assert ours["over_splitkv"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    draw_steps(result, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    one = StepBenchmark(1, result.points[:1])
    draw_steps(one, tmp_path / "one.png")


def test_table_tells_who_is_ahead(
    result: StepBenchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    print_steps(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "equal to the formulas" in printed
    assert "NOT by the formula" not in printed
    assert "with fewer bytes: " in printed
    assert "bytes and time grow" in printed
    assert printed.count("auto would choose ") == len(result.points)
    assert "the time of the best method that a launch offers, " in printed
    point = result.points[-1]
    name = point.ours.method.name
    wrong = replace(point, runs=point.runs | {name: replace(point.ours, calls=1)})
    print_steps(StepBenchmark(1, [wrong]))
    assert f"NOT by the formula for {name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.job
def test_under_torchrun_one_rank_speaks_and_time_passes(tmp_path: Path) -> None:
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_splitkv bench step"
    )
    arguments = "--links none --contexts 256 --queries 64 --repeats 1 --json --output"
    ran = subprocess.run(
        [sys.executable, *command.split(), *arguments.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    (point,) = json.loads(ran.stdout)["points"]
    assert point["links"] is None
    assert point["cp_size"] == 2
    for method in point["methods"].values():
        assert method["as_formula"]
        assert method["attention_and_communication_seconds"]["median"] > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step.json", "step.png"]


# Placement


def test_all_methods_draft_the_same_blocks() -> None:
    for cp_size in (2, 3, 4):
        for method in (*SPLITKV, *PEERS):
            layout = SHAPE.plan(method, cp_size).layout
            kept = layout.anchor_positions[layout.block_keep_mask]
            assert sorted(kept) == sorted(SHAPE.layout.anchor_positions)


def test_ulysses_is_left_out_where_it_cannot_deal_out_heads() -> None:
    assert {m.strategy for m in SHAPE.methods(4)} == set(CP_COMM_TYPES)
    assert {m.strategy for m in SHAPE.methods(3)} == set(CP_COMM_TYPES) - {"a2a"}


def test_blocks_lie_as_a_launch_deals_them_out_or_as_published() -> None:
    assert {m.name for m in (*SPLITKV, *PEERS) if not m.offered} == {"ringx", "lv_xattn"}
    for method in (*SPLITKV, *PEERS):
        assert SHAPE.plan(method, 4).block_order == method.block_order


def test_placements_balance_what_they_are_meant_to() -> None:
    shape = StepShape(context=32768, queries=1024)
    found = {m.name: imbalance(m, shape.plan(m, 4)) for m in (*SPLITKV, *PEERS)}
    assert found["splitkv q+heads"] < 1e-3
    assert found["a2a"] == 0
    assert found["all_gather"] < 0.03
    assert 0.05 < found["p2p"] < 0.3  # zigzag balances the sum, not every hop
    assert found["lv_xattn"] > 0.4
    assert found["ringx"] > 0.4
    for name in ("p2p balanced", "ringx balanced", "lv_xattn balanced"):
        assert found[name] < 0.03


# Times, from a timeline made up


def _steps(context: float, attention: float) -> list[RankStep]:
    """Two ranks that project, gather 1000 bytes, and attend; the second computes twice as long."""
    steps = []
    for factor in (1.0, 2.0):
        gathered = Collective("all_gather", "q", 500.0, np.dtype("uint8"))  # type: ignore[arg-type]
        at = context * factor
        moments = [
            Moment(0.0, "begin"),
            Moment(0.0, "phase", "context"),
            Moment(at, "phase", "attention"),
            Moment(at, "launch", "q", gathered, blocking=True),
            Moment(at + attention * factor, "end"),
        ]
        steps.append(RankStep(moments, 0.0, 0.0, 500.0, 1))
    return steps


def test_seconds_are_told_apart() -> None:
    shape = StepShape(shrink=4)
    method = Method("splitkv", "balanced", gather="hidden", scatter="proj")
    plan = shape.plan(method, 2)
    injection = Injection(LINKS, LINKS.attention_flops / 1600, shape)
    assert injection.slowdown == pytest.approx(100.0)
    gather = 100 * LINKS.all_gather_seconds(1000 * 16, 2)
    repeated = 100 * repeated_flops(shape, method, plan) / LINKS.dense_flops
    times = injection.times(_steps(1.0, 0.1), method, plan, whole=False)
    # Mean computation; the slower rank's lead over it; the gather, which hides behind nothing.
    assert times == pytest.approx([0.15 + repeated, 0.05, gather])
    projected = 100 * context_flops(shape, plan) / LINKS.dense_flops  # mean of both ranks
    whole = injection.times(_steps(1.0, 0.1), method, plan, whole=True)
    assert whole.sum() == pytest.approx(4 / 3 * projected + 0.2 + gather + repeated)
    plain = injection.times(_steps(1.0, 0.1), SPLITKV[0], plan, whole=False)
    assert plain[0] == pytest.approx(0.15)


def test_flops_by_hand() -> None:
    shape = StepShape(context=4096, queries=1024)
    plan = shape.plan(SPLITKV[0], 4)
    # d 2048, five tapped layers, 4096 wide queries, 2 x 512 wide keys and values.
    features = 4 * 1024 * 5 * 2048 * 2048
    assert context_flops(shape, plan) == features + 6 * (1024 + 256) * 2048 * 1024
    assert [repeated_flops(shape, m, plan) / (6 * 768 * 2048 * 4096) for m in SPLITKV] == [
        0,
        1,
        1,
        2,
    ]


# What auto would choose


def test_auto_sees_the_machine_that_is_injected() -> None:
    """A core that reaches 1 / 4000 of the machine's kernel, and calls it in 0.3 ms of its own."""
    chosen = {}
    for context, call in ((4096, 3e-4), (4096, 0.1), (32768, 3e-4)):
        shape = StepShape(context=context, queries=1024, ranks_per_node=2)
        injection = Injection(LINKS, LINKS.attention_flops / 4000, shape, call)
        auto = choose_auto(shape, 4, injection, shape.methods(4))
        chosen[context, call] = auto.method.name
        assert auto.method.offered
        assert auto.method.strategy == auto.choice.strategy
    assert chosen == {
        (4096, 3e-4): "all_gather",
        (4096, 0.1): "splitkv q+heads",  # one call where a gather has four
        (32768, 3e-4): "splitkv q+heads",
    }


def test_a_smaller_layer_stands_for_the_drafters() -> None:
    """All that is estimated is the same, but for key heads that Ulysses must repeat."""
    small = StepShape(context=32768, queries=1024, ranks_per_node=2, shrink=2)
    whole = replace(small, shrink=1)
    seconds = []
    for shape in (small, whole):
        slowdown = 1000 / shape.shrink**2
        injection = Injection(LINKS, LINKS.attention_flops / 1000, shape, 1e-6 * slowdown)
        assert injection.slowdown == pytest.approx(slowdown)
        assert standing_links(injection).call_latency == pytest.approx(1e-6)
        seconds.append(choose_auto(shape, 4, injection, shape.methods(4)).choice.seconds)
    for strategy in ("splitkv", "all_gather", "ringx"):  # statistics are as wide as heads are many
        assert seconds[0][strategy] == pytest.approx(seconds[1][strategy], rel=0.02), strategy


def test_small_nodes_keep_the_bandwidth_of_a_rank() -> None:
    for preset in ("nvlink-400g", "nvlink-400g-shared", "pcie-ethernet"):
        links = PRESETS[preset]
        for size in (1, 2, 4, 8):
            small = small_nodes(links, size)
            assert small.ranks_per_node == size
            assert small.inter_bandwidth == pytest.approx(links.inter_bandwidth)
            assert isinstance(small.nics_per_node, int)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--drafter qwen9", "target 'qwen9'"),
        ("--shrink 3", "shrink 3 does not divide the attention heads"),
        ("--shrink 0", "shrink 0 must be at least 1"),
        ("--queries 100", "100 queries and 4096 context rows do not divide"),
        ("--queries 65536", "take fewer queries or more context"),
        ("--contexts 1k", "--contexts '1k' is not a list of numbers"),
        ("--ranks 1", "ranks [1] must be at least 2"),
        ("--ranks 0", "ranks [0] must be at least 2"),
        ("--ranks 8 --queries 16", "too few for 8 ranks"),
        ("--links warp", "links 'warp' is neither a file nor one of"),
        ("--ranks-per-node 0", "ranks_per_node 0 must be at least 1"),
        ("--repeats 0", "repeats 0 and warmups 1 must be at least 1"),
        ("--dtype float8", "dtype 'float8' is not known"),
        ("--samples 3", "do not divide into 3 samples"),
        ("--seed -1", "seed -1 must not be negative"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()  # no progress bar before it
    assert line.startswith("splitkv bench: ")
    assert said in line


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        StepShape(context=0)
