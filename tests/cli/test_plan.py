"""`splitkv plan`: what it prints, draws and refuses."""

import json
import sys

import numpy as np
import pytest

from megatron_splitkv.cli import main
from megatron_splitkv.cli.plan import parse_windows
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.testing.synthetic import make_synthetic_store
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset, split_batch

SMALL = ["plan", "--documents", "2x512,256", "--num-anchors", "16", "--cp-size", "4"]
FIGURES = {
    "imbalance_percent",
    "tile_imbalance_percent",
    "max_work_pairs",
    "max_context_rows",
    "rows_moved_percent",
    "rows_moved_matched_percent",
    "queries_needed_percent",
    "queries_needed_matched_percent",
    "planning_ms",
}


def said_by(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_everything(capsys):
    said = said_by(capsys, *SMALL)
    assert said["context_lengths"] == [1280]
    assert said["blocks"] == [48]
    assert said["cp_size"] == 4
    assert said["windows"] == [None]
    assert said["sources"] == ["zigzag in every document"]
    assert list(said["strategies"])[:5] == ["none", "zigzag", "lpt", "balanced", "balanced-local"]
    for figures in said["strategies"].values():
        assert figures.keys() == FIGURES | {"worst"}
        assert figures["worst"].keys() == FIGURES
        for name in FIGURES:
            assert figures["worst"][name] == pytest.approx(figures[name])  # of one micro-batch
    zigzag = said["strategies"]["zigzag"]
    assert zigzag["max_context_rows"] == 320
    assert zigzag["rows_moved_percent"] == zigzag["rows_moved_matched_percent"] == 0
    assert said["strategies"]["none"]["imbalance_percent"] > zigzag["imbalance_percent"]


def test_table_and_pictures(tmp_path, capsys):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    for name in ("plan.png", "plan.svg"):
        file = tmp_path / name
        assert main([*SMALL, "--strategies", "none,balanced", "--draw", str(file)]) == 0
        printed = capsys.readouterr().out
        assert "1,280 context rows, 48 blocks of 16, 4 ranks" in printed
        assert "zigzag in every document" in printed
        assert f"drawn: {file}" in printed
        assert file.stat().st_size > 10_000
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["plan.png", "plan.svg"]
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(
        "megatron_splitkv.plan.comparison.compare_strategies",
        lambda *args, **kwargs: pytest.fail("it was planned"),
    )
    for file in ("plan.pdf", "no/such/folder/plan.png"):
        assert main([*SMALL, "--draw", file]) == 2


def test_strategies_are_shown_in_the_order_asked_for(capsys):
    said = said_by(capsys, *SMALL, "--strategies", "balanced,none,balanced")
    assert list(said["strategies"]) == ["balanced", "none"]


def test_what_is_missing_for_hypergraph_is_said(monkeypatch, capsys):
    monkeypatch.setattr("megatron_splitkv.cli.plan.find_spec", lambda name: None)
    assert main(SMALL) == 0
    assert "pip install 'megatron-splitkv[hypergraph]'" in capsys.readouterr().out
    assert "hypergraph" not in said_by(capsys, *SMALL)["strategies"]


def test_several_draws_have_means_and_a_worst_case(capsys):
    first, second = (
        said_by(capsys, *SMALL, "--strategies", "none", "--step", step)["strategies"]["none"]
        for step in ("3", "4")
    )
    both = said_by(capsys, *SMALL, "--strategies", "none", "--step", "3", "--steps", "2")
    figures, name = both["strategies"]["none"], "imbalance_percent"
    assert first[name] != second[name]
    assert figures[name] == pytest.approx((first[name] + second[name]) / 2)
    assert figures["worst"][name] == pytest.approx(max(first[name], second[name]))
    assert main([*SMALL, "--steps", "2"]) == 0
    output = capsys.readouterr()
    assert "means of 2 micro-batches" in output.out
    assert "2/2" in output.err  # the progress bar


def test_windows_change_the_price(capsys):
    full = said_by(capsys, *SMALL, "--strategies", "none")
    mixed = said_by(capsys, *SMALL, "--strategies", "none", "--windows", "none,32,32")
    assert mixed["windows"] == [None, 32, 32]
    work = "max_work_pairs"
    assert mixed["strategies"]["none"][work] < full["strategies"]["none"][work]
    assert parse_windows("None, 7") == (None, 7)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "store"
    make_synthetic_store(folder, [40, 64, 24, 56, 33, 48], prompt_length=4)
    return folder


def test_a_store_is_packed_and_planned_as_in_training(store, tmp_path, capsys, monkeypatch):
    from megatron_splitkv.data.store import FeatureStore

    arguments = ["plan", "--feature-store", str(store), "--seq-length", "96", "--cp-size", "2"]
    options = {"num_anchors": 5, "block_size": 4, "seed": 7}
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    seen = []
    monkeypatch.setattr(
        "megatron_splitkv.plan.comparison.tile_imbalance",
        lambda plan: seen.append(plan) or 0.0,
    )
    said = said_by(capsys, *arguments, "--strategies", "balanced", "--step", "2", "--steps", "2")
    opened = FeatureStore(store)
    recipe = BlockRecipe(
        mask_token_id=63, plan_strategy="balanced", chunks_per_rank=None, **options
    )
    dataset = PackDataset(
        opened,
        PackedEpochs(opened.lengths, 96, 7),
        recipe,
        num_items=4,
        cp_rank=0,
        cp_size=2,
    )
    for i, plan in enumerate(seen):
        item = {name: tensor[None] for name, tensor in dataset[2 + i].items()}
        trained = ContextPlan.from_arrays(split_batch(item)[1])
        assert plan.digest == trained.digest
        assert said["context_lengths"][i] == trained.context_length
        assert said["blocks"][i] == int(np.sum(trained.layout.block_keep_mask))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--documents 4xfoo", "--documents '4xfoo' is not a list of lengths"),
        ("--documents 0", "--documents '0' is not a list of lengths"),
        ("--prompt-fraction 1", "--prompt-fraction 1.0 must be in [0, 1)"),
        ("--seed -1", "--seed -1 must not be negative"),
        ("--step -1", "--step -1 must not be negative"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--cp-size 0", "cp_size 0 must be at least 1"),
        ("--windows none,0", "--windows 'none,0': '0' is no window; write 'none'"),
        ("--windows full", "--windows 'full': 'full' is no window"),
        ("--strategies balanced,best", "--strategies 'best' is not known; choose one of: none"),
        ("--draw plan.pdf", "plan.pdf: pictures are written as .png or .svg"),
        ("--draw no/such/folder/plan.png", "plan.png: its folder does not exist"),
        ("--seq-length 64", "--seq-length packs a feature store: give --feature-store too"),
        ("--feature-store no/such", "no/such"),
        ("--source contiguous --documents 1281", "1281 rows, which do not divide"),
    ],
)
def test_bad_input(options, message, capsys):
    arguments = [*SMALL, *options.split()]
    if "--feature-store" in options:
        arguments = ["plan", "--seq-length", "64", *options.split()]
    assert main(arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("splitkv plan: ")
    assert message in errors[0]


def test_a_store_and_a_description_do_not_go_together(store, capsys):
    for options in ("--documents 64", "--prompt-fraction 0"):
        arguments = ["plan", "--feature-store", str(store), "--seq-length", "64"]
        assert main([*arguments, *options.split()]) == 2
        assert f"{options.split()[0]} describes a workload" in capsys.readouterr().err
    assert main(["plan", "--feature-store", str(store)]) == 2
    assert "--feature-store needs --seq-length" in capsys.readouterr().err
