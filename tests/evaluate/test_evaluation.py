"""The whole measurement on random models, as a library and as a command."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate import (
    DraftModel,
    EvaluationPrompt,
    EvaluationResult,
    evaluate_drafter,
    print_table,
)
from megatron_splitkv.evaluate.cached_target import target_texts
from megatron_splitkv.evaluate.drafters import Drafter, ModelDrafter, NGramDrafter
from megatron_splitkv.evaluate.greedy import Comparison
from megatron_splitkv.evaluate.heads import DFlashHead
from megatron_splitkv.evaluate.recorded_target import RecordedTarget
from megatron_splitkv.evaluate.report import context_label, truncation_sentence
from megatron_splitkv.evaluate.result import METHODS
from megatron_splitkv.evaluate.speculative import DraftStep
from megatron_splitkv.export import write_drafter
from tests.evaluate.models import (
    DRAFTER,
    EOS,
    VOCAB,
    decode_greedily,
    decode_speculatively,
    prompts,
    random_zlab_tensors,
    tiny_target,
)


def trained() -> DraftModel:
    return DraftModel.from_tensors(DRAFTER, random_zlab_tensors())


def numbered(token_ids: list[list[int]]) -> list[EvaluationPrompt]:
    return [EvaluationPrompt(f"p{i}", tokens) for i, tokens in enumerate(token_ids)]


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
@pytest.mark.parametrize("stop", [(), (EOS, 60, 63)], ids=["no stop", "stop"])
def test_replayed_controls_count_what_real_decoding_counts(
    kind: str, stop: tuple[int, ...]
) -> None:
    target = tiny_target(kind)
    head = DFlashHead(DRAFTER)
    drafters: list[Drafter] = [
        ModelDrafter(trained(), head, target),
        ModelDrafter(trained(), head, target, use_context=False),
        ModelDrafter(DraftModel.untrained(DRAFTER, seed=0), head, target),
        NGramDrafter(),
    ]
    options: Any = {"max_new_tokens": 37, "stop_token_ids": stop}
    proposals = DRAFTER.num_proposals
    seen = set()
    with target_texts(target, DRAFTER.target_layer_ids) as new_text:
        for prompt in prompts(2):
            (text,) = decode_greedily(new_text(), [prompt], **options)
            for drafter in drafters:
                (real,), (replay,) = (
                    decode_speculatively(
                        target, drafter, [prompt], num_proposals=proposals, **options
                    )
                    for target in (new_text(), RecordedTarget([text]))
                )
                assert real == replay
                assert real.new_tokens == text.new_tokens
                seen |= {step.produced for step in real.steps}
    assert len(seen) > 2, "too dull to tell counts apart"


def test_result_holds_together() -> None:
    target = tiny_target()
    result = evaluate_drafter(trained(), target, numbered(prompts(4)), max_new_tokens=30)
    assert set(result.accept_len) == {"trained", "untrained", "no_context", "ngram"}
    assert result.greedy_equal
    assert not result.mismatches
    for method, length in result.accept_len.items():
        assert 1 <= length <= DRAFTER.block_size
        interval = result.intervals[method]
        assert interval is not None
        assert interval.low <= length <= interval.high
        histogram = result.histogram(method)
        steps = sum(histogram)
        produced = sum(n * count for n, count in enumerate(histogram, start=1))
        assert produced == 4 * 29, "all new tokens but each prompt's first"
        assert length == produced / steps
        rates = result.slot_acceptance(method)
        assert len(rates) == DRAFTER.block_size - 1
        known = [rate for rate in rates if rate is not None]
        assert all(0 <= rate <= 1 for rate in known)
    values = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert values["accept_len"] == pytest.approx(result.accept_len)
    assert values["greedy_equal"] is True
    assert {"greedy decoding", "speculative decoding", "controls"} == values["seconds"].keys()
    bins = result.by_context()
    assert [context.start for context in bins] == [0]
    assert bins[0].accept_len == pytest.approx(result.accept_len)
    assert result.differences["ngram"][0] == pytest.approx(
        result.accept_len["trained"] - result.accept_len["ngram"]
    )


def test_steps_fall_into_bins_by_their_anchors() -> None:
    steps = [DraftStep(3, 1, 2), DraftStep(3, 0, 1), DraftStep(3, 3, 4), DraftStep(1, 1, 1)]
    result = EvaluationResult(
        prompt_ids=["a", "b"],
        prompt_lengths=[126, 255],  # anchors 126, 128, 129, 133 and 255, 257, 258, 262
        truncated_tokens=[0, 40],
        steps={method: [steps, steps] for method in METHODS},
        comparisons=[Comparison(True)] * 2,
        block_size=4,
        num_proposals=3,
        max_new_tokens=9,
    )
    first, second, third = (context for context in result.by_context())
    assert (first.start, first.stop, first.steps["trained"]) == (0, 128, 1)
    assert first.accept_len["trained"] == 2
    assert (second.start, second.stop, second.steps["ngram"]) == (128, 256, 4)
    assert second.accept_len["ngram"] == (1 + 4 + 1 + 2) / 4
    assert (third.start, third.stop, third.steps["trained"]) == (256, 512, 3)
    assert third.accept_len["trained"] == 2
    assert [context_label(context) for context in (first, second)] == ["<128", "128-255"]
    assert truncation_sentence(result).startswith("1 of 2 prompts (50%) lost their beginning: 40")
    console = Console(record=True, width=120, file=io.StringIO())
    print_table(result, console)
    for words in ("Acceptance length by the tokens", "128-255", "lost their beginning"):
        assert words in console.export_text(clear=False)


def test_context_reaches_the_drafter() -> None:
    """The control without context is another drafter, or it would show nothing."""
    result = evaluate_drafter(trained(), tiny_target(), numbered(prompts(3)), max_new_tokens=30)
    assert result.steps["no_context"] != result.steps["trained"]
    assert result.steps["untrained"] != result.steps["trained"]


def test_untrained_drafter_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = DraftModel.untrained(DRAFTER, seed=5).state_dict()
    torch.manual_seed(2)
    same, other = (DraftModel.untrained(DRAFTER, seed=s).state_dict() for s in (5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_one_prompt_has_no_interval() -> None:
    result = evaluate_drafter(trained(), tiny_target(), numbered(prompts(1)), max_new_tokens=8)
    assert result.intervals["trained"] is None
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": 7}, "number of target layers is 7, the target's is 5"),
        ({"vocab_size": VOCAB + 1}, f"vocabulary is {VOCAB + 1}, the target's is {VOCAB}"),
        ({"hidden_size": 32}, "hidden size is 32, the target's is 64"),
    ],
)
def test_a_drafter_of_another_target_is_refused(change: dict[str, int], message: str) -> None:
    config = type(DRAFTER)(**(DRAFTER.__dict__ | change))
    drafter = DraftModel.from_tensors(config, random_zlab_tensors(config))
    with pytest.raises(ConfigError, match=message):
        evaluate_drafter(drafter, tiny_target(), numbered(prompts(1)))


def test_prompts_that_do_not_fit_are_refused() -> None:
    for tokens, message in (
        ([], "'p0' has no token"),
        ([3, VOCAB], "outside the target's vocabulary of 97"),
        ([3] * 400, "exceeds the target's 512 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate_drafter(trained(), tiny_target(), numbered([tokens]))
    with pytest.raises(ConfigError, match="at least 2"):
        evaluate_drafter(trained(), tiny_target(), numbered(prompts(1)), max_new_tokens=1)
    for tokens in (512, 100_000_000_000):
        with pytest.raises(ConfigError, match=f"{tokens}, which leaves no room for a prompt"):
            evaluate_drafter(trained(), tiny_target(), numbered([[3]]), max_new_tokens=tokens)
    with pytest.raises(ConfigError, match=r"truncate the prompts to 1 tokens"):
        evaluate_drafter(trained(), tiny_target(), numbered([[3, 3]]), max_new_tokens=511)
    with pytest.raises(ConfigError, match="no prompt"):
        evaluate_drafter(trained(), tiny_target(), [])


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Arguments that name a drafter, a target and prompts."""
    tiny_target().save_pretrained(tmp_path / "target")
    write_drafter(tmp_path / "drafter", random_zlab_tensors(), DRAFTER)
    lines = [{"id": f"p{i}", "token_ids": ids} for i, ids in enumerate(prompts(3))]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [
        "evaluate",
        *("--drafter", str(tmp_path / "drafter")),
        *("--target", str(tmp_path / "target")),
        *("--prompts", str(tmp_path / "prompts.jsonl")),
        *("--max-new-tokens", "20"),
    ]


def test_command_prints_one_table_and_writes_what_was_asked_for(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, plot = tmp_path / "out/report.json", tmp_path / "acceptance.png"
    assert main([*folders, "--output", str(report), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for words in ("trained drafter", "untrained drafter", "no context", "n-gram repeat"):
        assert words in out
    assert "All 3 decoded texts equal the target's plain greedy decoding" in " ".join(out.split())
    values = json.loads(report.read_text())
    assert set(values["accept_len"]) == {"trained", "untrained", "no_context", "ngram"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_goes_on_after_a_kill(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "drafter/report.json"  # beside the weights, which stay what they are
    command = [*folders, "--output", str(output)]
    with monkeypatch.context() as patch:
        patch.setattr("megatron_splitkv.evaluate.write_report", None)  # dies at the end
        with pytest.raises(TypeError):
            main(command)
    assert not output.exists()
    assert main([*command, "--seed", "3"]) == 2
    assert "seed was 0, is 3; start anew with --overwrite" in capsys.readouterr().err
    monkeypatch.setattr("megatron_splitkv.evaluate.evaluation.greedy_decode", None)
    assert main([*command, "--batch-size", "1"]) == 0
    assert "Going on after 3 of 3 prompts" in capsys.readouterr().out
    assert json.loads(output.read_text())["resumed_prompts"] == 3
    assert not list(output.parent.glob("*.unfinished"))


def test_a_report_is_replaced_on_request_only(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "report.json"
    command = [*folders, "--limit", "1", "--output", str(output)]
    output.write_text("precious")
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"splitkv evaluate: --output {output} exists already; name another file, or add "
        "--overwrite to replace it\n"
    )
    assert output.read_text() == "precious"
    assert [file.name for file in tmp_path.glob("report*")] == ["report.json"]
    with monkeypatch.context() as patch:
        patch.setattr("megatron_splitkv.evaluate.write_report", None)  # dies at the end
        with pytest.raises(TypeError):
            main([*command, "--overwrite"])
    assert output.read_text() == "precious"
    assert main(command) == 0  # goes on with what was asked for
    assert json.loads(output.read_text())["resumed_prompts"] == 1
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0
    assert json.loads(output.read_text())["resumed_prompts"] == 0


def test_command_prints_json(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*folders, "--json", "--limit", "2"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["prompts"] == 2
    assert values["greedy_equal"] is True


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--drafter", "nowhere", "drafter nowhere cannot be read"),
        ("--target", "nowhere", "not a Hugging Face folder"),
        ("--prompts", "nowhere", "prompts nowhere cannot be read"),
        ("--limit", "0", "--limit is 0"),
        ("--batch-size", "0", "--batch-size is 0"),
        ("--max-prompt-tokens", "0", "allow at least 1"),
        ("--seed", str(2**64), "--seed 18446744073709551616 must be at least 0 and less than 2^64"),
        ("--seed", "-1", "--seed -1 must be at least 0"),
        ("--output", ".", "--output . is a directory; name a file"),
        ("--plot", ".", "--plot . is a directory; name a file"),
        ("--chat-template-options", "{x", "--chat-template-options {x is no JSON object"),
        ("--chat-template-options", "[" * 5000 + "]" * 5000, "is no JSON object"),
    ],
)
def test_command_refuses_bad_input_in_one_line(
    option: str,
    value: str,
    message: str,
    folders: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*folders, option, value]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
