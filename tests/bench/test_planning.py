"""`splitkv bench plan`: what it measures, prints, writes and refuses."""

import json
import math

import numpy as np
import pytest

from megatron_splitkv.bench.planning import (
    PAPER_IMBALANCE,
    PlanningShape,
    ScalingPoint,
    bench_planning,
    draw_samples,
)
from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import build_plan

SMALL = ["--contexts=1024,4096", "--ranks=2,4", "--chunks-per-rank=4", "--seeds=2", "--scale-to=4"]


@pytest.fixture(scope="module")
def result():
    shape = PlanningShape((1024, 4096), (2, 4), chunks_per_rank=4, seeds=2, scale_to=4)
    return bench_planning(shape)


def test_points_of_both_studies():
    shape = PlanningShape()
    assert shape.points == [(2**k, 8) for k in range(14, 19)] + [(2**18, p) for p in (16, 32, 64)]
    assert shape.studies == {"contexts": [0, 1, 2, 3, 4], "ranks": [4, 5, 6, 7]}
    assert shape.scaling_ranks == [4, 16, 64, 256, 1024]
    assert PlanningShape(scale_to=1).scaling_ranks == [1]
    assert PlanningShape(scale_to=3).scaling_ranks == [3]
    one = PlanningShape(contexts=(1024,), ranks=(2,))
    assert one.points == [(1024, 2)]
    assert one.studies == {"contexts": [0], "ranks": [0]}


def test_the_papers_workload():
    layout, length = draw_samples(4, 4096, seed=3)
    assert length == 4 * 4096
    assert layout.num_blocks == 4 * 512
    assert layout.block_size == 16
    inside = layout.anchor_positions - layout.document_starts
    assert 1024 <= inside.min() <= inside.max() < 4096
    assert np.unique(layout.document_starts).tolist() == [0, 4096, 8192, 12288]


def test_imbalances_are_those_of_the_plans(result):
    assert [(p.context, p.cp_size) for p in result.points] == [(1024, 2), (4096, 2), (4096, 4)]
    for point in result.points:
        for strategy in ("none", "zigzag", "lpt", "balanced", "balanced-local"):
            expected = [
                build_plan(
                    *draw_samples(4, point.context, seed),
                    point.cp_size,
                    strategy=strategy,
                    chunks_per_rank=4,
                ).imbalance
                for seed in range(2)
            ]
            assert point.imbalance[strategy].tolist() == expected
            assert point.seconds[strategy].shape == (2 * 3,)
    assert [p.cp_size for p in result.study("ranks")] == [2, 4]
    means = [100 * p.imbalance["none"].mean() for p in result.points[1:]]
    assert result.study_mean("ranks", "none") == pytest.approx(sum(means) / 2)


def test_growth_is_measured_per_item_and_doubling():
    point = ScalingPoint(8, 1 << 20, blocks=96, chunks=32, milliseconds=1.0)
    assert point.nanoseconds_per_step == pytest.approx(1e6 / (128 * 7))


def test_scaling_points(result):
    assert [(p.cp_size, p.context_length) for p in result.scaling] == [(1, 1 << 16), (4, 1 << 18)]
    assert [p.blocks for p in result.scaling] == [512, 512]
    assert [p.chunks for p in result.scaling] == [32, 128]


def test_json_keeps_the_papers_numbers_apart(result):
    said = json.loads(json.dumps(result.to_json()))
    assert said["paper"]["measured"] == "by its authors, on another machine"
    assert said["paper"]["mean_imbalance_percent"] == {
        "contexts": {"none": 46.49, "zigzag": 7.94, "lpt": 0.38, "hypergraph": 0.66},
        "ranks": {"none": 55.26, "zigzag": 8.01, "lpt": 0.21, "hypergraph": 0.80},
    }
    assert said["paper"]["planning_ms_range"]["ranks"]["hypergraph"] == [148.38, 1164.64]
    assert set(said["mean_imbalance_percent"]) == {"contexts", "ranks"}
    point = said["points"][2]["strategies"]["balanced"]
    assert point["seeds"] == 2
    assert set(point["imbalance_percent"]) == {"mean", "std", "worst"}
    assert said["scaling"][1]["ns_per_item_and_log2"] == pytest.approx(
        1e6 * said["scaling"][1]["milliseconds"] / ((512 + 128) * math.log2(512 + 128))
    )
    assert set(PAPER_IMBALANCE) <= {"none", "zigzag", "lpt", "hypergraph"}


def test_without_kahypar_the_rest_runs(monkeypatch, capsys):
    monkeypatch.setattr("megatron_splitkv.bench.planning.find_spec", lambda name: None)
    assert main(["bench", "plan", *SMALL]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "hypergraph is left out: it needs KaHyPar" in printed


def test_hypergraph_is_left_out_beyond_64_ranks(monkeypatch):
    monkeypatch.setattr("megatron_splitkv.bench.planning.find_spec", lambda name: name)
    assert "hypergraph" in PlanningShape(ranks=(8, 64)).strategies
    assert "hypergraph" not in PlanningShape(ranks=(8, 65)).strategies


def test_chunks_are_checked_at_every_point():
    PlanningShape((1024, 4096), (2, 4), chunks_per_rank=2048)
    with pytest.raises(ConfigError, match="at most 2,048 for 4 samples of 4,096 tokens on 8 ranks"):
        PlanningShape((4096,), (2, 8), chunks_per_rank=2049)


def test_command_prints_and_writes(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main(["bench", "plan", *SMALL, "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    for words in ("Imbalance over contexts", "Planning over ranks", "46.49", "0.01 to 0.05"):
        assert words in printed
    assert sorted(file.name for file in folder.iterdir()) == ["plan.json", "plan.png"]
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "plan.json").read_text())["shape"]["contexts"] == [1024, 4096]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--contexts 16k", "--contexts '16k' is not a list of numbers"),
        ("--contexts 4096,1024", "contexts [4096, 1024] must ascend"),
        ("--ranks 0,2", "ranks [0, 2] must ascend and be at least 1"),
        ("--seeds 0", "seeds 0 must be at least 1"),
        ("--chunks-per-rank 0", "chunks_per_rank 0 must be at least 1"),
        ("--scale-to 0", "scale_to 0 must be at least 1"),
        ("--scale-to 1000000000", "scale_to: 1,000,000,000 must be at most 4,096"),
        ("--contexts 10000000000000", "contexts: 10,000,000,000,000 must be at most 16,777,216"),
        ("--ranks 1000000 --chunks-per-rank 1", "ranks: 1,000,000 must be at most 4,096"),
        ("--chunks-per-rank 99999", "must be at most 2,048 for 4 samples of 1,024 tokens on 2"),
        ("--ranks \u0663", "is not a list of numbers"),
    ],
)
def test_bad_input(options, message, monkeypatch, capsys):
    monkeypatch.setattr(
        "megatron_splitkv.bench.planning.bench_planning",
        lambda *args: pytest.fail("it was planned"),
    )
    assert main(["bench", "plan", *SMALL, *options.split()]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("splitkv bench: ")
    assert message in errors[0]
