"""`splitkv bench balance`: steps on gloo ranks, what is made of their seconds, bad input."""

import json

import numpy as np
import pytest

from megatron_splitkv.bench.balance import BalanceBenchmark, BalanceRun
from megatron_splitkv.bench.balance_step import BalanceShape
from megatron_splitkv.cli import main

SMALL = ["--ranks=2", "--repeats=2", "--context=256", "--anchors=8", "--block-size=4"]


def run_of(seconds, max_work=(4.0,)):
    seconds = np.array(seconds, dtype=float)
    return BalanceRun(seconds, seconds.sum(2).max(1), np.array(max_work), np.zeros(len(max_work)))


def test_a_step_is_the_slowest_rank_of_every_phase():
    run = run_of([[[1, 10, 100], [2, 5, 200]]])
    assert run.step_seconds("inside").tolist() == [2 + 10 + 200]
    assert run.step_seconds("ahead").tolist() == [10 + 200]


def test_speedups_are_of_the_same_draws():
    """Seconds differ fourfold between repeats, the ratio within one never."""
    none = run_of([[[0, 2 * k, 2 * k]] for k in (1, 2, 4)], (6, 8, 10))
    other = run_of([[[k, k, k]] for k in (1, 2, 4)], (3, 4, 5))
    result = BalanceBenchmark(BalanceShape(), {1: {"none": none, "balanced": other}})
    ahead, inside = (result.speedup(1, "balanced", way) for way in ("ahead", "inside"))
    assert (ahead.estimate, ahead.low, ahead.high) == (2, 2, 2)
    assert inside.estimate == pytest.approx(4 / 3)
    assert inside.low == pytest.approx(inside.high) == pytest.approx(4 / 3)
    assert result.predicted(1, "balanced") == 2


def test_default_shape_has_the_papers_proportions():
    shape = BalanceShape()
    layout, dflash = shape.layout(1), shape.dflash
    assert layout.num_blocks == shape.anchors
    assert dflash.num_attention_heads * dflash.head_dim == 2 * dflash.hidden_size
    # Multiplications for a context row: its pairs, and its projections to features, keys, values.
    pairs = shape.plan(layout, 1, "none").context_work.sum() / shape.context
    attention = 2 * pairs * dflash.num_attention_heads * dflash.head_dim
    projections = dflash.hidden_size * (
        dflash.feature_width + 2 * dflash.num_key_value_heads * dflash.head_dim
    )
    assert 8 < attention / projections < 20
    assert shape.plan(layout, 2, "none").imbalance == pytest.approx(0.47, abs=0.05)
    assert shape.plan(layout, 4, "none").imbalance == pytest.approx(0.6, abs=0.05)


def test_no_more_anchors_than_tokens():
    shape = BalanceShape(context=16, anchors=10**11)
    assert shape.layout(1).num_blocks == 11  # 12 supervised, the last has nothing to predict
    work = BalanceShape(context=2, anchors=1, ranks=(1,)).layout(1)
    assert work.block_keep_mask.tolist() == [True]


def test_command_trains_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_splitkv.bench.balance.find_spec", lambda name: None)
    assert main(["bench", "balance", *SMALL, "--output", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    printed = " ".join(output.out.split())
    for words in ("2 ranks", "1 x 256 context rows", "speed-up", "balanced"):
        assert words in printed
    assert "12/12" in output.err  # four strategies, two steps each and one to warm up
    assert (tmp_path / "out" / "balance.png").read_bytes().startswith(b"\x89PNG")
    said = json.loads((tmp_path / "out" / "balance.json").read_text())
    assert list(said["ranks"]) == ["2"]
    of = said["ranks"]["2"]
    assert list(of) == ["none", "zigzag", "lpt", "balanced"]
    shape = BalanceShape(context=256, anchors=8, block_size=4)
    for name, figures in of.items():
        plans = [shape.plan(shape.layout(number), 2, name) for number in (1, 2)]
        assert figures["imbalance_percent"] == pytest.approx(
            100 * np.mean([plan.imbalance for plan in plans])
        )
        assert all(len(of_ranks) == 2 for of_ranks in figures["cpu_seconds_by_rank"].values())
        assert all(min(of_ranks) > 0 for of_ranks in figures["cpu_seconds_by_rank"].values())
        assert figures["step_seconds"]["inside"] > figures["step_seconds"]["ahead"] > 0
        assert figures["speedup"]["ahead"].keys() == {"estimate", "low", "high"}
    assert of["none"]["predicted_by_work"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--repeats 1", "repeats 1 must be at least 2"),
        ("--ranks 0", "ranks [0] must be at least 1"),
        ("--ranks two", "--ranks 'two' is not a list of numbers"),
        ("--hidden-size 64", "hidden_size 64 must be a multiple of 128"),
        ("--context 0", "context 0 must be at least 1"),
        ("--block-size 1", "block_size is 1, it must be at least 2"),
        ("--seed -1", "seed -1 must not be negative"),
        ("--seed 1000000000000000000000", "must not be negative, and below 2**31"),
        ("--ranks 100000", "ranks [100000] must be at least 1, at most 64"),
        ("--chunks-per-rank 1000000", "256 context rows are too few for 2 ranks of chunks_per_"),
        (
            "--ranks 64 --context 32",
            "32 context rows are too few for 64 ranks of chunks",
        ),
        ("--context 100000000000", "GB together, and this machine has"),
        ("--layers 100000000", "GB together, and this machine has"),
        ("--hidden-size 12800000000", "GB together, and this machine has"),
        ("--block-size 1000000000000", "GB together, and this machine has"),
        ("--context 100000000 --anchors 100000000000", "take fewer ranks, samples, anchors"),
        ("--context 1 --anchors 1 --ranks 1", "context 1 leaves no anchor and no work"),
    ],
)
def test_bad_input(options, message, monkeypatch, capsys):
    monkeypatch.setattr(
        "megatron_splitkv.bench.balance.GlooPool", lambda ranks: pytest.fail("ranks were started")
    )
    assert main(["bench", "balance", *SMALL, *options.split()]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("splitkv bench: ")
    assert message in errors[0]
