"""`splitkv bench quality`: points, data, resumption and report; the training is a stand-in."""

import json
import sys
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_splitkv.bench import quality, quality_data, quality_training
from megatron_splitkv.bench.quality import QualityBenchmark, Scores, bench_quality
from megatron_splitkv.bench.quality_data import prepare_quality, store_folder, truncation
from megatron_splitkv.bench.quality_report import PAPER, draw_quality, print_quality
from megatron_splitkv.bench.quality_shape import FIX_Q, FIX_S, Point, QualityShape
from megatron_splitkv.bench.quality_training import train_drafter, training_command
from megatron_splitkv.cli import main
from megatron_splitkv.cli.bench_quality_decoding import HeldOutDecoding
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import load_target
from megatron_splitkv.data.text import TextFile
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.evaluate import DraftModel
from megatron_splitkv.export import write_drafter

TINY = QualityShape(
    contexts=(8, 16, 24, 32),
    anchors=(1, 2, 3, 6),
    steps=2,
    target_steps=2,
    documents=8,
    held_out=3,
    real=4,
    spoken=4,
    block_size=4,
)
TEXT = [TextFile("a", "abcdefghij" * 40, False), TextFile("b", "0123456789" * 20, True)]


# ---------------------------------------------------------------- points and their semantics


def test_the_studies_share_one_point():
    shape = QualityShape()
    assert shape.studies[FIX_Q] == tuple(Point(s, 32) for s in (128, 256, 512, 1024))
    assert shape.studies[FIX_S] == tuple(Point(1024, n) for n in (8, 16, 32, 64))
    assert len(shape.points) == len(set(shape.points)) == 7
    assert shape.points[0] == shape.shared == Point(1024, 32)
    assert [shape.queries(p) for p in shape.studies[FIX_S]] == [64, 128, 256, 512]
    assert {shape.queries(p) for p in shape.studies[FIX_Q]} == {256}


def test_candidates_are_those_of_the_anchors_draw():
    from megatron_splitkv.data.anchors import select_anchors

    mask = quality_data.supervised_rows(TINY, 24).numpy()
    layout = select_anchors(
        mask, [0, 24], num_anchors=24, block_size=4, seed=0, step=0, sample_ids=[0]
    )
    assert layout.block_keep_mask.sum() == TINY.candidates(24) == 9


def test_every_point_takes_as_many_samples_a_step():
    shape = QualityShape(documents=48)
    for point in shape.points:
        command = training_command(shape, point, Path("data"), Path("checkpoints"))
        option = dict(pairwise(command))
        assert option["--num-anchors"] == str(point.anchors)
        assert option["--train-iters"] == str(shape.steps)
        assert option["--feature-store"].endswith(f"samples-{point.context}")
        budget = int(option["--seq-length"])
        packs = PackedEpochs(np.full(shape.documents, point.context), budget, seed=1)
        assert packs.num_packs(0) == packs.num_packs(1) == 6
        assert all(packs.pack_documents(i).size == shape.samples for i in range(12))


def test_minutes_size_the_study():
    sizes = {"contexts": (128, 256, 512, 1024), "anchors": (8, 16, 32, 64)}
    short, long = (QualityShape.for_minutes(m, **sizes) for m in (15, 60))
    assert 20 < short.steps < long.steps
    assert short.target_steps < long.target_steps
    assert short.documents % short.samples == 0
    given = QualityShape.for_minutes(15, steps=60, **sizes)
    assert given.steps == 60
    assert given.documents * 6 == given.steps * given.samples  # six epochs
    assert QualityShape.for_minutes(15, steps=60, documents=16, **sizes).documents == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--contexts 128,256,200", "must be at least 3 ascending numbers"),
        ("--contexts 128,200,256", "contexts [200] must be multiples of a turn's 64 tokens"),
        ("--anchors 8,16", "anchors [8, 16] must be at least 3 ascending numbers"),
        ("--anchors 8,16,64", "a sample of 128 tokens has 62 places for anchors, not 64"),
        ("--documents 12", "documents 12 must be a multiple of the 8 samples of a step"),
        ("--prompts 1", "held_out 1 must be at least 2"),
        ("--steps 0", "steps 0 must be at least 1"),
        ("--ranks 0", "ranks 0 must be at least 1"),
        ("--seed -1", "seed -1 must be at least 0"),
        ("--minutes 0", "minutes 0.0 must be more than 0, and finite"),
        ("--minutes nan", "minutes nan must be more than 0, and finite"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    command = ["bench", "quality", *options.split(), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("splitkv bench: ")
    assert message in errors[0]


# ---------------------------------------------------------------- target, samples, stores


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    facts = prepare_quality(TINY, folder, lambda: TEXT, Stages())
    return folder, facts


def test_samples_are_turns_of_text_and_of_the_targets_own_words(prepared):
    folder, facts = prepared
    assert facts["steps"] == 2
    model = load_target(folder / "target", torch.float32)
    store = FeatureStore(store_folder(folder, 32), verify="full")
    assert store.lengths.tolist() == [32] * 8
    for document in range(8):
        ids, mask = store.token_ids(document), store.loss_mask(document)
        assert mask.tolist() == ([False] * 4 + [True] * 4) * 4
        assert bytes(ids[~mask].tolist()).decode() in "abcdefghij" * 40
        with torch.inference_mode():
            said = model(torch.from_numpy(ids)[None]).logits[0].argmax(dim=-1).numpy()
        assert (said[:-1] == ids[1:])[mask[1:]].all()


def test_stores_hold_the_same_samples_cut(prepared):
    folder, _ = prepared
    whole = FeatureStore(store_folder(folder, 32))
    for context in TINY.contexts:
        cut = FeatureStore(store_folder(folder, context), verify="full")
        assert cut.lengths.tolist() == [context] * 8
        for document in range(8):
            assert (cut.token_ids(document) == whole.token_ids(document)[:context]).all()
            assert (cut.loss_mask(document) == whole.loss_mask(document)[:context]).all()
            rows = whole.read_features(document, 0, context)
            assert torch.equal(cut.read_features(document, 0, context), rows)


def test_prompts_are_held_out(prepared):
    folder, _ = prepared
    samples = json.loads((folder / "prompts.json").read_text())
    assert [len(sample) for sample in samples] == [32] * 3
    for sample in samples:
        real = [token for at, token in enumerate(sample) if at % 8 < 4]
        assert bytes(real).decode() in "0123456789" * 20


def test_a_finished_part_is_not_made_again(prepared, monkeypatch):
    folder, facts = prepared
    monkeypatch.setattr(quality_data, "train_tiny_target", lambda *a: pytest.fail("trained again"))
    again = prepare_quality(TINY, folder, lambda: pytest.fail("read again"), Stages())
    assert again == facts
    summary = folder / quality_data.SUMMARY_FILE
    index = (store_folder(folder, 8) / "index.json").read_text()
    summary.unlink()  # killed while it wrote the stores
    stages = Stages()
    assert prepare_quality(TINY, folder, lambda: TEXT, stages) == facts
    assert set(stages.seconds) == {"target speaks", "features"}
    assert (store_folder(folder, 8) / "index.json").read_text() == index


def test_too_little_text(tmp_path):
    with pytest.raises(ConfigError, match="give 12 pieces of 16 bytes, needs 13"):
        quality_data.text_rows(TEXT, True, 13, 16, seed=0)


def test_truncated_share():
    lengths = np.array([10, 20, 40, 30])
    assert truncation(lengths, 20) == {"truncated": 0.5, "kept": 0.7}
    assert truncation(lengths, 40) == {"truncated": 0.0, "kept": 1.0}


# ---------------------------------------------------------------- one drafter


def test_a_training_job_shows_its_progress(tmp_path, monkeypatch):
    lines = "print(' iteration 1/ 2 | x |'); print('noise'); print(' iteration 2/ 2 | x |')"
    monkeypatch.setattr(
        quality_training, "training_command", lambda *args: [sys.executable, "-c", lines]
    )
    seen = []
    place = tmp_path / "checkpoints"
    train_drafter(TINY, TINY.shared, tmp_path, place, lambda *at: seen.append(at))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert "noise" in (tmp_path / "train.log").read_text()


def test_a_failed_training_says_why(tmp_path, monkeypatch):
    lines = "import sys; print('error: the store is gone'); print('more'); sys.exit(3)"
    monkeypatch.setattr(
        quality_training, "training_command", lambda *args: [sys.executable, "-c", lines]
    )
    with pytest.raises(ConfigError, match="s32-n3 ended with exit code 3: error: the store is go"):
        train_drafter(TINY, TINY.shared, tmp_path, tmp_path / "checkpoints", lambda *at: None)


def untrained_drafter(folder):
    meta = FeatureStore(store_folder(folder, 32)).meta
    config = DFlashConfig(
        hidden_size=meta.target.hidden_size,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        ffn_hidden_size=16,
        vocab_size=meta.target.vocab_size,
        num_target_layers=meta.target.num_layers,
        target_layer_ids=meta.target_layer_ids,
        block_size=TINY.block_size,
        mask_token_id=meta.target.mask_token_id,
    )
    return config, dict(DraftModel.untrained(config, seed=0).state_dict())


def test_held_out_prompts_fill_their_contexts(prepared, tmp_path, monkeypatch):
    folder, _ = prepared
    config, tensors = untrained_drafter(folder)
    here = "megatron_splitkv.cli.bench_quality_decoding."
    monkeypatch.setattr(
        here + "export_drafter", lambda source, output: write_drafter(output, tensors, config)
    )
    measure, seen = HeldOutDecoding(), []
    scores = measure(TINY, folder, tmp_path, tmp_path / "one", lambda *at: seen.append(at))
    # The first new token comes from the prompt and belongs to no draft step.
    assert scores.produced.tolist() == [[3] * 4] * 3
    assert scores.draft_steps.shape == (3, 4)
    assert ((scores.draft_steps >= 1) & (scores.draft_steps <= 3)).all()
    assert scores.greedy_equal
    assert 1 <= scores.ngram <= 3
    assert seen[-1] == (12, 12)
    samples = json.loads((folder / "prompts.json").read_text())
    said = [measure._greedy[3].tokens, measure._greedy[4].tokens]
    assert said == [samples[0], samples[1][:8]]  # the sample's own last turn

    monkeypatch.setattr(here + "greedy_decode", lambda *a, **k: pytest.fail("decoded again"))
    again = measure(TINY, folder, tmp_path, tmp_path / "two", lambda *at: None)
    assert again.to_json() == scores.to_json()
    wrong = measure._greedy[0]
    measure._greedy[0] = replace(
        wrong, new_tokens=[t ^ 1 for t in wrong.new_tokens], gaps=[1.0] * 4
    )
    assert not measure(TINY, folder, tmp_path, tmp_path / "three", lambda *a: None).greedy_equal


# ---------------------------------------------------------------- the study and its resumption


def scores_of(point, equal=True):
    """Longer drafts for larger points; sample 1 has twice the steps of sample 0."""
    per_step = 2 + point.anchors / 10 + point.context / 100
    draft_steps = np.array([[10] * 4, [20] * 4, [30] * 4])
    produced = np.rint(draft_steps * per_step).astype(np.int64)
    produced[:, 0] += draft_steps[:, 0]  # one token more at the shortest context
    return Scores(produced, draft_steps, equal, 0, 1.75)


class StandIns:
    """Training and measurement that only take notes; the training of one point may fail."""

    def __init__(self, fails=None):
        self.fails, self.trained, self.measured = fails, [], []

    def train(self, shape, point, data, checkpoints, progress):
        if point == self.fails:
            raise KeyboardInterrupt
        self.trained.append(point)
        checkpoints.mkdir(parents=True)
        (checkpoints / "of").write_text(f"{point.context} {point.anchors}")

    def measure(self, shape, data, checkpoints, drafter, progress):
        point = Point(*map(int, (checkpoints / "of").read_text().split()))
        self.measured.append(point)
        return scores_of(point)

    def study(self, folder, shape=TINY):
        return bench_quality(
            shape, folder, list, train=self.train, measure=self.measure, stages=Stages()
        )


FACTS = {"target": "a target", "parameters": 10, "steps": 2, "loss": 1.5}


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.setattr(quality, "prepare_quality", lambda *args: FACTS)


def test_a_second_start_repeats_nothing(tmp_path, no_data):
    first = StandIns(fails=TINY.points[2])
    with pytest.raises(KeyboardInterrupt):
        first.study(tmp_path)
    assert first.measured == list(TINY.points[:2])
    second = StandIns()
    result = second.study(tmp_path)
    assert second.trained == second.measured == list(TINY.points[2:])
    third = StandIns()
    assert third.study(tmp_path).to_json() == result.to_json()
    assert not third.trained
    for point in TINY.points:
        assert result.scores[point].to_json() == scores_of(point).to_json()


def test_a_folder_belongs_to_one_study(tmp_path, no_data):
    StandIns().study(tmp_path)
    with pytest.raises(ConfigError, match="holds a study with steps 2, not 3; give the options"):
        StandIns().study(tmp_path, replace(TINY, steps=3))


# ---------------------------------------------------------------- numbers and pictures


@pytest.fixture
def result():
    scores = {point: scores_of(point) for point in TINY.points}
    seconds = {point: {"train": 1.0, "measure": 2.0} for point in TINY.points}
    return QualityBenchmark(TINY, FACTS, scores, seconds)


def test_acceptance_length_is_tokens_over_steps(result):
    point = Point(32, 6)
    scores = result.scores[point]
    overall = result.accept_len(point)
    assert overall.estimate == scores.produced.sum() / scores.draft_steps.sum()
    assert overall.low <= overall.estimate <= overall.high
    at = result.accept_len(point, 16)
    assert at.estimate == scores.produced[:, 1].sum() / scores.draft_steps[:, 1].sum()
    assert result.accept_len(point, 8).estimate == pytest.approx(at.estimate + 1)


def test_intervals_are_over_samples():
    """Ten samples, half of them twice as good: the interval is that of their mean."""
    draft_steps = np.full((10, 4), 10)
    produced = np.repeat([20, 40], 5)[:, None] * np.ones((1, 4), dtype=np.int64)
    scores = dict.fromkeys(TINY.points, Scores(produced, draft_steps, True, 0, 1.0))
    interval = QualityBenchmark(TINY, FACTS, scores, {}).accept_len(TINY.shared)
    assert interval.estimate == 3
    assert interval.low == pytest.approx(3 - 1.96 / np.sqrt(10), abs=0.1)
    assert interval.high == pytest.approx(3 + 1.96 / np.sqrt(10), abs=0.1)


def test_differences_are_paired(result):
    """Points differ by a constant in every sample: the difference is sure, the lengths are not."""
    produced = np.array([[20] * 4, [30] * 4, [50] * 4])
    draft_steps = np.full((3, 4), 10)
    low, high = Point(32, 1), Point(32, 2)
    scores = {
        low: Scores(produced, draft_steps, True, 0, 1.0),
        high: Scores(produced + 5, draft_steps, True, 0, 1.0),
    }
    benchmark = QualityBenchmark(TINY, FACTS, scores, {})
    difference = benchmark.difference(high, low)
    assert (difference.low, difference.high) == pytest.approx((0.5, 0.5))
    assert benchmark.accept_len(low).high - benchmark.accept_len(low).low > 1
    ratio = benchmark.ratio(high, low)
    assert ratio.estimate == pytest.approx(1.15)
    # Of the worst and the best sample, not of one's best over the other's worst.
    assert (ratio.low, ratio.high) == pytest.approx((1.1, 1.25))
    assert vars(benchmark.ratio(low, low)) == {"estimate": 1, "low": 1, "high": 1}


def test_gains_and_span(result):
    lengths = [result.accept_len(point).estimate for point in TINY.studies[FIX_S]]
    gains = result.gains(FIX_S)
    assert [gain.estimate for gain in gains] == pytest.approx(np.diff(lengths))
    assert result.span(FIX_S) == pytest.approx(lengths[-1] / lengths[0] - 1)


def test_the_papers_numbers():
    for study, spans in ((FIX_Q, (0.82, 0.70)), (FIX_S, (6.2, 6.2))):
        for lengths, span in zip(PAPER[study].lengths.values(), spans, strict=True):
            assert len(lengths) == len(PAPER[study].scaled)
            assert 100 * (max(lengths) / min(lengths) - 1) == pytest.approx(span, abs=0.05)
    shared = [
        [of[paper.scaled.index(paper.shared)] for of in paper.lengths.values()]
        for paper in PAPER.values()
    ]
    assert shared[0] == shared[1] == [6.12, 5.73]


def test_report_and_picture(result, tmp_path):
    def printed(of, width=140):
        console = Console(file=StringIO(), width=width)
        print_quality(of, console)
        return console.file.getvalue()

    text = printed(result)
    for words in (
        "Fix Q, scale S",
        "Fix S, scale Q",
        "a target, 10 parameters",
        "6.12",
        "repeat on the same texts: 1.75",
    ):
        assert words in text
    shared = result.accept_len(TINY.shared)
    assert f"{shared.estimate:.2f} [{shared.low:.2f}, {shared.high:.2f}]" in text
    assert "all texts equal plain greedy decoding" in text.replace("\n", " ")
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["8", "12"]]
    assert rows[0][2:5] == ["100", "/", "25"]  # all samples cut, a quarter of their tokens kept
    assert "6.08" in text  # the paper's point that has no counterpart here
    assert max(map(len, printed(result, 80).splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed(result, 80)
    broken = replace(result, scores=result.scores | {TINY.shared: scores_of(TINY.shared, False)})
    assert "SOME TEXTS DIFFER" in printed(broken)
    draw_quality(result, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_command_prints_and_writes(tmp_path, no_data, monkeypatch, capsys):
    stand_ins = StandIns()
    monkeypatch.setattr(quality_training, "train_drafter", stand_ins.train)
    monkeypatch.setattr(
        "megatron_splitkv.cli.bench_quality_decoding.HeldOutDecoding", lambda: stand_ins.measure
    )
    command = ["bench", "quality", "--steps", "20", "--prompts", "3", "--output", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "quality.json").read_text())
    assert said["greedy_equal"] is True
    assert said["studies"][FIX_S]["points"] == ["s1024-n8", "s1024-n16", "s1024-n32", "s1024-n64"]
    of = said["points"]["s256-n32"]
    assert (of["context"], of["queries"], of["truncated"], of["kept"]) == (256, 256, 1, 0.25)
    assert set(of["accept_len_by_context"]) == {"128", "256", "512", "1024"}
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert main(command) == 0
    assert len(stand_ins.trained) == 7  # none of them twice
    assert "Fix Q, scale S" in capsys.readouterr().out


@pytest.mark.job
def test_one_point_for_real(prepared, tmp_path):
    folder, _ = prepared
    checkpoints, seen = tmp_path / "checkpoints", []
    train_drafter(TINY, TINY.shared, folder, checkpoints, lambda *at: seen.append(at))
    assert seen[-1] == (2, 2)
    scores = HeldOutDecoding()(
        TINY, folder, checkpoints, tmp_path / "drafter", lambda done, total: None
    )
    assert scores.greedy_equal
    assert scores.produced.tolist() == [[3] * 4] * 3
