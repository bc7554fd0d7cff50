"""Reading prompts.jsonl."""

from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate import EvaluationPrompt, read_prompts


def read(tmp_path: Path, text: str) -> list[EvaluationPrompt]:
    (tmp_path / "prompts.jsonl").write_text(text)
    return read_prompts(tmp_path / "prompts.jsonl", lambda line: [ord(c) for c in line])


def test_ids_win_over_text(tmp_path: Path) -> None:
    text = (
        '{"id": "a", "token_ids": [1, 2], "text": "xy"}\n'
        "\n"
        '{"id": 7, "input_ids": [3]}\n'
        '{"prompt": "AB"}\n'
    )
    assert read(tmp_path, text) == [
        EvaluationPrompt("a", [1, 2]),
        EvaluationPrompt("7", [3]),
        EvaluationPrompt("4", [65, 66]),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"id": "a", "token_ids": [1]}\n{oops', "line 2 is no JSON"),
        ("[1, 2]", "line 1 is no JSON object"),
        ('{"id": "a"}', 'line 1 has neither "token_ids" nor "prompt"'),
        ('{"token_ids": [1, 2.5]}', "line 1: token ids must be a list of integers"),
        ('{"token_ids": [true]}', "line 1: token ids must be a list of integers"),
    ],
)
def test_bad_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)
