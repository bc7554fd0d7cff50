"""`splitkv plan`: what it prints, draws and refuses."""

import json
import sys

import numpy as np
import pytest

from megatron_splitkv.cli import build_parser, main
from megatron_splitkv.cli.plan import _strategies, parse_windows
from megatron_splitkv.cli.plan_workload import find_workload
from megatron_splitkv.config import PLAN_STRATEGIES
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


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "megatron_splitkv.plan.comparison.compare_strategies",
        lambda *args, **kwargs: pytest.fail("it was planned"),
    )
    (tmp_path / "plan.png").mkdir()
    for file, message in (
        ("plan.pdf", "plan.pdf: pictures are written as .png or .svg"),
        ("", "no name: pictures are written as .png or .svg"),
        ("no/such/folder/plan.png", "no/such/folder/plan.png: its folder does not exist"),
        (str(tmp_path / "plan.png"), "plan.png is a folder; name a picture in it"),
    ):
        assert main([*SMALL, "--draw", file]) == 2
        assert message in capsys.readouterr().err


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
    both_shown = ["none", "lpt"]
    assert main([*SMALL, "--steps", "2", "--strategies", ",".join(both_shown)]) == 0
    output = capsys.readouterr()
    assert "means of 2 micro-batches" in output.out
    # The progress bar: micro-batches, strategies, planned and counted through.
    assert f"{2 * len(both_shown) * 2}/{2 * len(both_shown) * 2}" in output.err


def test_windows_change_the_price(capsys):
    full = said_by(capsys, *SMALL, "--strategies", "none")
    mixed = said_by(capsys, *SMALL, "--strategies", "none", "--windows", "none,32,32")
    assert mixed["windows"] == [None, 32, 32]
    work = "max_work_pairs"
    assert mixed["strategies"]["none"][work] < full["strategies"]["none"][work]
    assert parse_windows("None, 7") == (None, 7)


def test_tiles_are_priced(capsys):
    arguments = ["plan", "--documents", "2x4096", "--num-anchors", "64", "--cp-size", "4"]
    arguments += ["--chunks-per-rank", "6", "--strategies", "zigzag,lpt"]
    pairs, tiles = said_by(capsys, *arguments), said_by(capsys, *arguments, "--tiles")
    assert (pairs["tiles"], tiles["tiles"]) == (False, True)
    name = "max_context_rows"
    assert pairs["strategies"]["zigzag"][name] == tiles["strategies"]["zigzag"][name]
    assert pairs["strategies"]["lpt"][name] % 128
    assert tiles["strategies"]["lpt"][name] % 128 == 0
    assert main([*arguments, "--tiles"]) == 0
    assert "chunks cut and priced by kernel tiles" in capsys.readouterr().out


def test_hypergraph_waits_to_be_asked_beyond_64_ranks(monkeypatch):
    monkeypatch.setattr("megatron_splitkv.cli.plan.find_spec", lambda name: name)
    assert _strategies(None, 64) == ([*PLAN_STRATEGIES], None)
    names, left_out = _strategies(None, 65)
    assert names == [name for name in PLAN_STRATEGIES if name != "hypergraph"]
    assert "more than 64 ranks" in left_out
    assert "--strategies hypergraph" in left_out
    assert _strategies("hypergraph", 65) == (["hypergraph"], None)


def test_what_is_too_much_to_count_is_a_dash(monkeypatch, capsys):
    monkeypatch.setattr("megatron_splitkv.plan.comparison._MOST_COUNTED", 0)
    assert main([*SMALL, "--strategies", "none"]) == 0
    printed = capsys.readouterr().out
    assert "-: ranks times blocks are too many to count that through" in printed
    (row,) = [line.split() for line in printed.splitlines() if line.strip().startswith("none ")]
    assert row.count("-") == 2
    said = said_by(capsys, *SMALL, "--strategies", "none")["strategies"]["none"]
    assert said["tile_imbalance_percent"] is said["queries_needed_percent"] is None


def test_no_more_anchors_than_tokens_as_in_training(capsys):
    arguments = ["plan", "--documents", "512,4", "--cp-size", "2", "--strategies", "none"]
    said = [said_by(capsys, *arguments, "--num-anchors", n) for n in ("512", "1000000000")]
    assert said[0]["blocks"] == said[1]["blocks"] == [385]


def test_memory_that_is_not_there_is_one_line(monkeypatch, capsys):
    for error, words in (
        (MemoryError(), "(out of memory)"),
        (OverflowError("Python int too large"), "(Python int too large)"),
    ):

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr("megatron_splitkv.plan.comparison.compare_strategies", fail)
        assert main(SMALL) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("splitkv plan: too large for this machine; take smaller numbers")
        assert words in last


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


@pytest.mark.parametrize("options", ["", "--max-anchors-per-pack 9 --seed 3"], ids=str)
def test_packs_are_those_of_a_launch_with_the_same_options(store, options):
    """Two epochs and more, pack by pack: documents, anchors and the item that keys their draw."""
    from megatron_splitkv.data.store import FeatureStore
    from megatron_splitkv.train.packing_arguments import packed_epochs
    from tests.train.launches import parse

    shared = ["--seq-length", "96", "--num-anchors", "5", "--block-size", "4", *options.split()]
    launch, opened = parse(shared), FeatureStore(store)
    packing = packed_epochs(launch, opened.lengths)
    items = packing.num_packs(0) + packing.num_packs(1) + 1
    planned = build_parser().parse_args(
        ["plan", "--feature-store", str(store), "--cp-size", "2", "--steps", str(items), *shared]
    )
    recipe = BlockRecipe(
        num_anchors=launch.num_anchors,
        block_size=launch.block_size,
        mask_token_id=63,
        plan_strategy="balanced",
        chunks_per_rank=None,
        seed=launch.seed,
    )
    dataset = PackDataset(opened, packing, recipe, num_items=items, cp_rank=0, cp_size=2)
    batches = list(find_workload(planned))
    assert len(batches) == items == (13 if options else 7)
    for item, batch in enumerate(batches):
        arrays = {name: tensor[None] for name, tensor in dataset[item].items()}
        trained = ContextPlan.from_arrays(split_batch(arrays)[1]).layout.without_padding()
        assert batch.cu_seqlens.tolist() == pack_bounds(opened, packing, item)
        for name in ("anchor_positions", "document_starts", "block_keep_mask"):
            ours, theirs = getattr(batch.layout, name), getattr(trained, name)
            assert np.array_equal(ours, theirs), name


def pack_bounds(store, packing, item):
    return [0, *np.cumsum(store.lengths[packing.pack_documents(item)]).tolist()]


def test_chunks_fit_a_stores_packs_as_in_training(store, capsys):
    arguments = ["plan", "--feature-store", str(store), "--seq-length", "96", "--cp-size", "2"]
    arguments += ["--strategies", "none,lpt", "--block-size", "4"]
    said = said_by(capsys, *arguments, "--chunks-per-rank", "1000", "--steps", "3")
    assert max(said["context_lengths"]) // 2 < 1000
    assert said["strategies"]["lpt"]["max_context_rows"] == pytest.approx(
        np.mean([-(-length // 2) for length in said["context_lengths"]])
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seq-length 96 --step 100000000000", "--step 100000000000 with --steps 1 is beyond"),
        ("--seq-length 96 --step 2999 --steps 1000000", "beyond 1000 epochs"),
        ("--seq-length 1", "--seq-length 1 must be at least --cp-size 2"),
        ("--seq-length 100000000000000000000", "at most 67,108,864"),
        ("--seq-length 96 --block-size 1000000000", "more than 16,777,216 draft rows"),
        ("--seq-length 96 --max-anchors-per-pack 0", "--max-anchors-per-pack 0 is too small"),
        ("--seq-length 63", "document 1 has 64 tokens, more than --seq-length 63"),
    ],
)
def test_what_a_store_cannot_give(store, options, message, capsys):
    arguments = ["plan", "--feature-store", str(store), "--cp-size", "2", *options.split()]
    assert main([*arguments, "--json"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--documents 4xfoo", "--documents '4xfoo' is not a list of at most"),
        ("--documents 0", "--documents '0' is not a list of at most"),
        ("--prompt-fraction 1", "--prompt-fraction 1.0 must be in [0, 1)"),
        ("--seed -1", "--seed -1 must not be negative"),
        ("--step -1", "--step -1 must not be negative"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--cp-size 0", "--cp-size 0 must be at least 1"),
        ("--cp-size 1000000000", "--cp-size 1000000000 must be at most 4096"),
        ("--cp-size 1281", "--cp-size 1281 is more ranks than the 1,280 context rows"),
        ("--documents 1000000000000x1", "'1000000000000x1' is not a list of at most 65,536"),
        ("--documents 2x99999999999", "up to 67,108,864 tokens together"),
        ("--documents 65537x1", "is not a list of at most 65,536 lengths"),
        ("--documents 0x5", "--documents '0x5' is not a list"),
        ("--documents \u0663", "is not a list"),
        ("--documents 4096x16 --cp-size 129", "2 a rank of 4,096 documents on 129 ranks are more"),
        ("--block-size 1000000000", "--block-size 1000000000 have more than 16,777,216 draft rows"),
        ("--block-size 1000000000000000000000", "more than 16,777,216 draft rows"),
        ("--documents 60000x300 --num-anchors 1000000000", "60,000 documents with 300 anchors"),
        ("--num-anchors 0", "num_anchors 0 must be at least 1"),
        ("--seed 1000000000000000000000", "must be in [0, 2**63)"),
        ("--chunks-per-rank 321", "--chunks-per-rank 321 must be from 1 to 320"),
        ("--chunks-per-rank 0", "--chunks-per-rank 0 must be from 1 to 320"),
        ("--documents 1x9000000 --cp-size 1 --chunks-per-rank 1048577", "1,048,576 chunks"),
        ("--windows 99999999999999999999999", "no window; write 'none'"),
        ("--windows 2147483649", "at most 2,147,483,648"),
        ("--windows \u0663", "is no window"),
        (f"--windows {'none,' * 1024}none", "names 1,025 layers; at most 1,024"),
        ("--windows none,0", "--windows 'none,0': '0' is no window; write 'none'"),
        ("--windows full", "--windows 'full': 'full' is no window"),
        ("--strategies balanced,best", "--strategies 'best' is not known; choose one of: none"),
        ("--draw plan.pdf", "plan.pdf: pictures are written as .png or .svg"),
        ("--draw no/such/folder/plan.png", "plan.png: its folder does not exist"),
        ("--seq-length 64", "--seq-length packs a feature store: give --feature-store too"),
        ("--max-anchors-per-pack 9", "--max-anchors-per-pack packs a feature store: give"),
        ("--feature-store no/such", "no/such"),
        ("--source contiguous --documents 1281", "1281 rows, no multiple of 4 "),
    ],
)
def test_bad_input(options, message, capsys):
    arguments = [*SMALL, "--json", *options.split()]
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
