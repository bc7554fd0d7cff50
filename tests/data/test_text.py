"""Text comes in a fixed order, held-out text stays apart, broken input is named."""

from pathlib import Path

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.text import (
    Conversation,
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
    lines.write_text(
        '{"text": "one"}\n\n'
        '{"id": 7, "conversations": [{"role": "user", "content": "q"}, '
        '{"role": "assistant", "content": "a"}]}\n'
        '{"messages": [{"role": "assistant", "content": "b"}]}\n'
    )
    samples = read_samples([plain, lines])
    assert samples[:2] == ["hello\n", "one"]
    assert samples[2] == Conversation(
        ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    )
    assert isinstance(samples[3], Conversation)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines_end_at_newlines_only(tmp_path: Path, end: str) -> None:
    file = tmp_path / "x.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    file.write_text(end.join(['{"text": "' + text + '"}', '{"text": "e"}', "oops"]), newline="")
    with pytest.raises(ConfigError, match=r"x\.jsonl line 3 is broken"):
        read_samples([file])
    file.write_text(end.join(['{"text": "' + text + '"}', "", '{"text": "e"}', ""]), newline="")
    assert read_samples([file]) == [text, "e"]


@pytest.mark.parametrize(
    "broken",
    [
        '{"text": ',
        "[1]",
        '{"other": 1}',
        '{"messages": [1]}',
        "3",
        r'{"text": "a\ud800b"}',
        r'{"messages": [{"role": "user", "content": "\udc00"}]}',
        "[" * 5000 + "]" * 5000,
    ],
)
def test_broken_line_is_named_by_its_number(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n\n' + broken + "\n")
    with pytest.raises(ConfigError, match=r"x\.jsonl line 3 is broken") as error:
        read_samples([file])
    assert "\n" not in str(error.value)


def test_unreadable_or_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples([tmp_path / "none.txt"])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples([tmp_path / "binary.txt"])
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="no text in"):
        read_samples([tmp_path / "empty.txt"])


def test_the_end_of_a_user_s_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0123456789abcdef" * 4)
    training, held_out = files_as_text([file])
    assert (training.held_out, held_out.held_out) == (False, True)
    assert training.text + held_out.text == file.read_text()
    assert len(held_out.text) == 2
