"""`splitkv bench step`: bytes by the formulas, the same data for all, its files and refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_splitkv.bench.step import StepBenchmark, bench_step
from megatron_splitkv.bench.step_rank import RankStep
from megatron_splitkv.bench.step_report import draw_steps, print_steps
from megatron_splitkv.bench.step_shape import (
    PEERS,
    SPLITKV,
    Method,
    StepShape,
    context_flops,
    imbalance,
    mirrored_order,
    repeated_flops,
)
from megatron_splitkv.bench.step_time import Injection, small_nodes
from megatron_splitkv.cli import main
from megatron_splitkv.comm.links import PRESETS
from megatron_splitkv.comm.meter import Collective
from megatron_splitkv.comm.virtual_clock import Moment
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError

SHAPE = StepShape(context=2048, queries=64, ranks_per_node=2)  # Q:S 1:32
SHORT = replace(SHAPE, context=256)  # 1:4
LINKS = small_nodes(PRESETS["nvlink-400g"], 2)


@pytest.fixture(scope="module")
def result() -> StepBenchmark:
    """On 2, 3 and 4 gloo ranks, each of which imports Megatron; on 4 a shorter context too."""
    few = bench_step([SHAPE], ranks=(2, 3), links=LINKS, repeats=1)
    many = bench_step([SHORT, SHAPE], ranks=(4,), links=LINKS, repeats=1)
    return StepBenchmark(1, few.points + many.points)


@pytest.mark.timeout(600)
def test_bytes_and_calls_are_those_of_the_formulas(result: StepBenchmark) -> None:
    for point in result.points:
        strategies = {run.method.strategy for run in point.runs.values()}
        # Eight heads cannot be dealt out to three ranks.
        assert strategies == set(CP_COMM_TYPES) - ({"a2a"} if point.cp_size == 3 else set())
        for name, run in point.runs.items():
            assert run.bytes == pytest.approx(run.formula_bytes, rel=1e-12), name
            assert min(run.bytes) > 0
            assert run.calls == run.formula_calls, name
            assert run.as_formula


@pytest.mark.timeout(600)
def test_only_query_bound_strategies_send_the_same_over_eight_times_the_context(
    result: StepBenchmark,
) -> None:
    short, long = (point for point in result.points if point.cp_size == 4)
    assert 8 * short.shape.context == long.shape.context
    assert short.runs.keys() == long.runs.keys()
    for name, run in long.runs.items():
        growth = np.sum(run.bytes) / np.sum(short.runs[name].bytes)
        if run.method.strategy in ("splitkv", "lv_xattn"):
            assert growth == 1
        else:
            assert growth > 2, name


@pytest.mark.timeout(600)
def test_splitkv_sends_the_least_and_all_methods_compute_the_same(result: StepBenchmark) -> None:
    for point in (point for point in result.points if point.shape == SHAPE):
        for name, run in point.runs.items():
            assert run.difference < 0.02, name  # bf16
            if run.method.strategy != "splitkv":
                assert np.mean(run.bytes) > np.mean(point.ours.bytes), name


@pytest.mark.timeout(600)
def test_what_it_says(result: StepBenchmark, tmp_path: Path) -> None:
    said = json.loads(json.dumps(result.to_json()))
    assert len(said["points"]) == 4
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


@pytest.mark.timeout(600)
def test_table_tells_who_is_ahead(
    result: StepBenchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    print_steps(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "equal to the formulas" in printed
    assert "NOT by the formula" not in printed
    assert "with fewer bytes: " in printed
    assert "bytes and time grow" in printed
    point = result.points[-1]
    name = point.ours.method.name
    wrong = replace(point, runs=point.runs | {name: replace(point.ours, calls=1)})
    print_steps(StepBenchmark(1, [wrong]))
    assert f"NOT by the formula for {name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.job
@pytest.mark.timeout(600)
def test_under_torchrun_one_rank_speaks_and_time_passes(tmp_path: Path) -> None:
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_splitkv bench step"
    )
    arguments = "--links none --contexts 256 --queries 64 --repeats 1 --json --output"
    ran = subprocess.run(
        [sys.executable, *command.split(), *arguments.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
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


def test_mirrored_blocks_give_each_rank_an_early_and_a_late_stretch() -> None:
    assert mirrored_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sorted(mirrored_order(13, 3)) == list(range(13))


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
    err = capsys.readouterr().err
    last = err.strip().splitlines()[-1]
    assert last.startswith("splitkv bench: ")
    assert said in last


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        StepShape(context=0)
