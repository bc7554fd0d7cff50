"""Text comes in a fixed order, held-out text stays apart, broken input is named."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.text import (
    Conversation,
    RawSample,
    files_as_text,
    read_samples,
    standard_library_text,
)


def test_standard_library_is_large_ordered_and_split() -> None:
    files = standard_library_text()
    assert [f.name for f in files] == sorted((f.name for f in files), key=lambda n: Path(n))
    assert files == standard_library_text()
    held_out = sum(len(f.text) for f in files if f.held_out)
    total = sum(len(f.text) for f in files)
    assert total > 3_000_000
    assert 0.01 < held_out / total < 0.1
    assert not any("site-packages" in f.name or f.name.startswith("test/") for f in files)


def test_a_file_is_held_out_by_its_name_alone() -> None:
    everything = {f.name: f.held_out for f in standard_library_text()}
    some = {f.name: f.held_out for f in standard_library_text(max_bytes=2_000_000)}
    assert len(some) < len(everything)
    assert all(everything[name] == held_out for name, held_out in some.items())


def test_samples_of_plain_text_and_json_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("hello\n")
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    records = [
        {"text": "one"},
        {"id": 7, "conversations": [question, answer]},
        {"text": None, "messages": [answer], "tools": [{"name": "look"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    lines.write_text("\n\n".join(map(json.dumps, records)))
    assert list(read_samples([plain, lines])) == [
        RawSample(str(plain), "hello\n"),
        RawSample(f"{lines} line 1", "one"),
        RawSample(f"{lines} line 3", Conversation((question, answer))),
        RawSample(f"{lines} line 5", Conversation((answer,), ({"name": "look"},))),
        RawSample(f"{lines} line 7", Conversation((question, answer))),
    ]


def test_messages_keep_what_a_template_may_know(tmp_path: Path) -> None:
    message = {"role": "assistant", "reasoning_content": "r", "tool_calls": [{"name": "f"}]}
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"messages": [{**message, "content": None}, message]}))
    ((content),) = (sample.content for sample in read_samples([file]))
    assert content == Conversation(({**message, "content": ""},) * 2)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines_end_at_newlines_only(tmp_path: Path, end: str) -> None:
    file = tmp_path / "x.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    file.write_text(end.join(['{"text": "' + text + '"}', '{"text": "e"}', "oops"]), newline="")
    with pytest.raises(ConfigError, match=r"x\.jsonl line 3 is broken"):
        list(read_samples([file]))
    file.write_text(end.join(['{"text": "' + text + '"}', "", '{"text": "e"}', ""]), newline="")
    assert [sample.content for sample in read_samples([file])] == [text, "e"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"text": ', "Expecting value"),
        ("[1]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('{"other": 1}', "must be a JSON object with 'text' or 'conversations'"),
        ('{"text": 5}', "'text' must be a text, not int"),
        ('{"conversations": {}}', "'conversations' must be a list of JSON objects"),
        ('{"messages": [1]}', "'messages' must be a list of JSON objects"),
        ('{"messages": [], "tools": {"a": 1}}', "'tools' must be a list of JSON objects"),
        ('{"messages": [{"role": "user"}]}', "'content' must be a text, not NoneType"),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "'content' must be a text, not list",
        ),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot' is not known; choose one"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "role .* is not known"),
        ('{"messages": [{"content": "a"}]}', "role None is not known"),
        ('{"messages": [{"from": "bing", "value": "a"}]}', "role 'bing' is not known"),
        ('{"messages": [{"from": ["x"], "value": "a"}]}', "'from' must be a text"),
        ('{"messages": [{"from": "human"}]}', "'value' must be a text"),
        (r'{"text": "a\ud800b"}', "half of a surrogate pair"),
        (r'{"text": "a\uD800b"}', "half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "half of a surrogate pair"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)
def test_broken_line_is_named_by_its_number(tmp_path: Path, broken: str, reason: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n\n' + broken + "\n")
    samples = read_samples([file])
    assert next(samples).content == "fine"
    with pytest.raises(ConfigError, match=rf"x\.jsonl line 3 is broken: .*{reason}") as error:
        next(samples)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl line 2 is broken: 'utf-8' codec"):
        list(read_samples([file]))


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(r'{"text": "\ud83d\ude00"}')
    assert next(read_samples([file])).content == "\U0001f600"


@pytest.mark.parametrize("name", ["a.txt", "a.JSONL"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    text = "abc" if name == "a.txt" else '{"text": "abc"}'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [sample.content for sample in read_samples([tmp_path / name])] == ["abc"]


def test_json_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    file.write_text(line * 1000)
    tracemalloc.start()
    try:
        assert sum(len(str(sample.content)) for sample in read_samples([file])) == 10_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def test_line_ends_of_other_systems_are_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"plain\r\ntext\rend")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"text": "line"}\r\n')
    samples = list(read_samples([tmp_path / "a.txt", tmp_path / "b.jsonl"]))
    assert [sample.content for sample in samples] == ["plain\ntext\nend", "line"]


def test_unreadable_or_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "fine.txt").write_text("a")
    # Before the first sample is read, not after hours.
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read: No such file"):
        read_samples([tmp_path / "fine.txt", tmp_path / "none.txt"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_samples([tmp_path])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_samples([tmp_path / "binary.txt"]))
    (tmp_path / "chats.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"chats\.json is one JSON text, .* named \*\.jsonl"):
        read_samples([tmp_path / "chats.json"])
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    with pytest.raises(ConfigError, match=r"no text in .*empty\.txt, .*empty\.jsonl"):
        list(read_samples([tmp_path / "empty.txt", tmp_path / "empty.jsonl"]))


def test_the_end_of_a_user_s_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0123456789abcdef" * 4)
    training, held_out = files_as_text([file])
    assert (training.held_out, held_out.held_out) == (False, True)
    assert training.text + held_out.text == file.read_text()
    assert len(held_out.text) == 2


def test_conversations_are_no_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n{"messages": []}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl line 2 is a conversation"):
        files_as_text([file])
