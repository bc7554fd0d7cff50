"""An evaluation that was interrupted goes on where it stopped, and only that one."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate import (
    DraftModel,
    Journal,
    evaluate_drafter,
    evaluation,
    evaluation_inputs,
)
from megatron_splitkv.evaluate.greedy import Comparison
from megatron_splitkv.evaluate.journal import PromptOutcome
from megatron_splitkv.evaluate.prompts import EvaluationPrompt
from megatron_splitkv.evaluate.result import EvaluationResult
from megatron_splitkv.evaluate.speculative import DraftStep
from tests.evaluate.models import DRAFTER, prompts, random_zlab_tensors, tiny_target

INPUTS = {"prompts": "abc", "max_new_tokens": 8}
OUTCOME = PromptOutcome(
    {
        "trained": [DraftStep(5, 2, 3), DraftStep(1, 1, 1)],
        "untrained": [DraftStep(5, 0, 1)],
        "no_context": [DraftStep(5, 1, 2)],
        "ngram": [],
    },
    Comparison(equal=False, position=3, gap=0.25),
)


class Killed(BaseException):
    """Not an `Exception`: nothing on the way may swallow it."""


class DyingJournal(Journal):
    """Kills the process before its n-th line is written."""

    lives = 0

    def add(self, prompt: int, outcome: PromptOutcome) -> None:
        if self.lives == 0:
            raise Killed
        self.lives -= 1
        super().add(prompt, outcome)


def evaluate(journal: Journal | None) -> EvaluationResult:
    return evaluate_drafter(
        DraftModel.from_tensors(DRAFTER, random_zlab_tensors()),
        tiny_target(),
        [EvaluationPrompt(f"p{i}", tokens) for i, tokens in enumerate(prompts(4))],
        max_new_tokens=5,
        batch_size=2,
        journal=journal,
    )


def without_seconds(result: EvaluationResult) -> dict[str, Any]:
    return {name: value for name, value in result.to_json().items() if name != "seconds"}


def test_a_kill_at_any_prompt_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_BATCHES_A_WAVE", 1)  # two waves of two prompts
    expected = without_seconds(evaluate(None))
    for lives in range(4):
        journal = DyingJournal(tmp_path / f"{lives}.unfinished", INPUTS)
        journal.lives = lives
        with pytest.raises(Killed):
            evaluate(journal)
        again = Journal(tmp_path / f"{lives}.unfinished", INPUTS)
        assert len(again.finished) == lives
        assert without_seconds(evaluate(again)) == expected
        assert len(again.finished) == 4
        again.remove()
        assert not again.path.exists()


def test_finished_prompts_are_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "x", INPUTS)
    expected = without_seconds(evaluate(journal))
    monkeypatch.setattr(evaluation, "greedy_decode", None)
    assert without_seconds(evaluate(Journal(tmp_path / "x", INPUTS))) == expected


def test_what_a_kill_leaves_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Journal(path, INPUTS).add(2, OUTCOME)
    whole = path.read_bytes()
    Journal(path, INPUTS).add(0, OUTCOME)
    path.write_bytes(path.read_bytes()[:-7])
    journal = Journal(path, INPUTS)
    assert journal.finished == {2: OUTCOME}
    assert path.read_bytes() == whole
    journal.add(1, OUTCOME)
    assert Journal(path, INPUTS).finished == {2: OUTCOME, 1: OUTCOME}


def test_other_inputs_are_refused_until_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    Journal(path, INPUTS).add(2, OUTCOME)
    message = "max_new_tokens was 8, is 9; start anew with --overwrite"
    with pytest.raises(ConfigError, match=message):
        Journal(path, INPUTS | {"max_new_tokens": 9})
    assert Journal(path, INPUTS).finished, "a refusal leaves the file alone"
    other = INPUTS | {"max_new_tokens": 9}
    assert Journal(path, other, overwrite=True).finished == {}
    assert Journal(path, INPUTS).finished == {}, "without a finished prompt nothing is lost"


WITHOUT_TRAINED = OUTCOME.to_json() | {"steps": {"untrained": [], "no_context": [], "ngram": []}}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello\n",
        b"[]\n",
        b'{"x": 1}\n',
        b'{"inputs": 1}\n',
        b'{"inputs": {}}\n{"prompt": 1}\n',
        json.dumps({"inputs": INPUTS}).encode()
        + b"\n"
        + json.dumps({"prompt": 0} | WITHOUT_TRAINED).encode()
        + b"\n",
        b'{"inputs": {}}\n' + b"[" * 5000 + b"]" * 5000 + b"\n",
        b'{"inputs": {}}\n\xff\n',
        b"\x00\n",
    ],
)
def test_other_files_are_refused_and_left_alone(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="no unfinished evaluation"):
        Journal(path, INPUTS)
    assert path.read_bytes() == text


def test_a_folder_is_its_model_whatever_else_lies_there(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text(file)
    inputs = evaluation_inputs(tmp_path, tmp_path, [])
    for file in ("report.json", "report.json.unfinished", "acceptance.png"):
        (tmp_path / file).write_text(file)
        assert evaluation_inputs(tmp_path, tmp_path, []) == inputs
    for file in ("config.json", "model.safetensors", "tokenizer.json", "model-2.safetensors"):
        before = evaluation_inputs(tmp_path, tmp_path, [])
        (tmp_path / file).write_text("longer than before")
        assert evaluation_inputs(tmp_path, tmp_path, []) != before


def test_lines_are_plain_json(tmp_path: Path) -> None:
    Journal(tmp_path / "x", INPUTS).add(2, OUTCOME)
    header, line = map(json.loads, (tmp_path / "x").read_text().splitlines())
    assert header == {"inputs": INPUTS}
    assert line["prompt"] == 2
    assert line["steps"]["trained"] == [[5, 2, 3], [1, 1, 1]]
