"""Real text: the Python standard library on this machine, and files that a user names."""

import codecs
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError

ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")

_HELD_OUT_ONE_IN = 32
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODING = "utf-8-sig"  # some editors begin a file with a byte order mark
# Tables of numbers and generated pages: not the text that a target should learn from.
_SKIPPED_FOLDERS = frozenset({"site-packages", "encodings", "pydoc_data"})
# ShareGPT writes {"from", "value"}, and calls the two speakers so.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class TextFile:
    """One file of text; `held_out` files are never trained on."""

    name: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Conversation:
    """Messages that a chat template turns into text.

    Args:
        messages: each ``{"role", "content"}``, the role one of `ROLES`. Other fields that a
            template may know (``tool_calls``, ``reasoning_content``) are kept as they are.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class RawSample:
    """One sample as a user wrote it.

    Args:
        origin: file, and line if the file has several samples, for messages.
        content: a plain text or a conversation.
    """

    origin: str
    content: str | Conversation


@dataclass(frozen=True)
class Place:
    """Where in a user's files a sample begins.

    Args:
        file: number of the file among them.
        byte: first byte of the line; 0 in a plain text.
        line: its number, from 1.
    """

    file: int = 0
    byte: int = 0
    line: int = 1


@dataclass(frozen=True)
class PlacedSample:
    """A sample, where it begins, and how many bytes of its file it takes."""

    place: Place
    size: int
    sample: RawSample


def standard_library_text(max_bytes: int | None = None) -> list[TextFile]:
    """Source files of Python's standard library, without its tests, in a fixed order.

    Whether a file is held out depends on its name alone, so training text and held-out text stay
    apart whatever is read of either.

    Args:
        max_bytes: stop after that much text; None reads all.

    Raises:
        ConfigError: this Python has no library sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[TextFile] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in _SKIPPED_FOLDERS or part.startswith("test") for part in relative.parts):
            continue
        name = relative.as_posix()
        text = path.read_bytes().decode("utf-8", errors="replace")
        files.append(TextFile(name, text, zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0))
        size += len(text)
        if max_bytes is not None and size >= max_bytes:
            break
    if not any(file.held_out for file in files) or all(file.held_out for file in files):
        raise ConfigError(f"no standard library sources under {root} to take text from")
    return files


def read_samples(paths: Sequence[str | Path]) -> Iterator[RawSample]:
    """Samples of a user's files, in order.

    ``*.jsonl``: one sample a line, either ``{"text": ...}`` or
    ``{"conversations": [{"role", "content"}, ...], "tools": [...]}`` (``messages`` is read alike,
    so are ShareGPT's ``from`` and ``value``; ``tools`` may be left out). Empty lines are skipped.
    Anything else is plain text, one sample a file.

    JSON lines are read one at a time: memory does not grow with the file.

    Args:
        paths: the files. Whether each can be opened is checked here, before the first sample.

    Yields:
        The samples.

    Raises:
        ConfigError: a file that cannot be read, one named ``*.json``, a broken line (named by its
            number), or no sample in any file.
    """
    files = [Path(path) for path in paths]
    for path in files:
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"text file {path} cannot be read: {error.strerror}") from error
        if path.suffix.lower() == ".json":
            raise ConfigError(
                f"text file {path} is one JSON text, which would be read as plain text; write a "
                "sample a line to a file named *.jsonl"
            )
    return (placed.sample for placed in read_from(files))


def read_from(paths: Sequence[Path], start: Place = Place()) -> Iterator[PlacedSample]:
    """The samples of `read_samples` from one of them on; nothing before it is read.

    Args:
        paths: all files.
        start: where a sample begins; the first one if not given.

    Raises:
        ConfigError: as `read_samples`.
    """
    empty = True
    for number in range(start.file, len(paths)):
        path, place = paths[number], start if number == start.file else Place(number)
        for placed in (_read_lines if path.suffix.lower() == ".jsonl" else _read_text)(path, place):
            empty = False
            yield placed
    if empty and start == Place():
        raise ConfigError(f"no text in {', '.join(map(str, paths))}")


def _read_text(path: Path, place: Place) -> Iterator[PlacedSample]:
    content = path.read_bytes()
    try:
        text = content.decode(_ENCODING).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text file {path} cannot be read: {error}") from error
    if text.strip():
        yield PlacedSample(place, len(content), RawSample(str(path), text))


def _read_lines(path: Path, place: Place) -> Iterator[PlacedSample]:
    byte = place.byte
    # Bytes end a line at a newline only; a JSON text may hold other separators, such as U+2028.
    with path.open("rb") as lines:
        lines.seek(byte)
        for number, line in enumerate(lines, start=place.line):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                origin = f"{path} line {number}"
                sample = RawSample(origin, _parse_line(origin, line))
                yield PlacedSample(Place(place.file, byte, number), len(line), sample)
            byte += len(line)


def _parse_line(origin: str, line: bytes) -> str | Conversation:
    try:
        # A lone surrogate cannot be UTF-8, only the escape of a JSON text can write it.
        sample = json.loads(line.decode(_ENCODING))
        if b"\\ud" in line.lower():
            _require_encodable(json.dumps(sample, ensure_ascii=False))
        return _content(sample)
    except RecursionError as error:
        raise ConfigError(f"{origin} is broken: it is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{origin} is broken: {error}") from error


def _content(sample: Any) -> str | Conversation:
    if not isinstance(sample, dict):
        raise ValueError("a line must be a JSON object with 'text' or 'conversations'")
    if sample.get("text") is not None:
        return _text(sample["text"], "'text'")
    field = next((f for f in ("conversations", "messages") if sample.get(f) is not None), None)
    if field is None:
        raise ValueError("a line must be a JSON object with 'text' or 'conversations'")
    messages = _objects(sample[field], repr(field))
    tools = _objects(sample.get("tools") or [], "'tools'")
    return Conversation(tuple(map(_message, messages)), tuple(tools))


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    if "from" in fields and "role" not in fields:
        speaker = _text(fields["from"], "'from'")
        role = _role(_SHAREGPT_ROLES.get(speaker, speaker))
        return {"role": role, "content": _text(fields.get("value"), "'value'")}
    message = {**fields, "role": _role(fields.get("role"))}
    if fields.get("content") is None and fields.get("tool_calls"):
        return {**message, "content": ""}
    return {**message, "content": _text(fields.get("content"), "'content'")}


def _role(role: Any) -> str:
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not known; choose one of: {', '.join(ROLES)}")
    return str(role)


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} must be a list of JSON objects")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {type(value).__name__}")
    return value


def _require_encodable(text: str) -> None:
    if has_lone_surrogate(text):
        raise ValueError("half of a surrogate pair is no text")


def has_lone_surrogate(text: str) -> bool:
    """Does a text hold half of a surrogate pair? JSON can write it, no tokenizer reads it."""
    return _SURROGATE.search(text) is not None


def files_as_text(paths: Sequence[str | Path]) -> list[TextFile]:
    """A user's plain texts, the last 1/32 of each held out.

    Raises:
        ConfigError: a file that cannot be read, a conversation, or no text.
    """
    files: list[TextFile] = []
    for sample in read_samples(paths):
        if not isinstance(sample.content, str):
            raise ConfigError(f"{sample.origin} is a conversation; this target reads plain text")
        cut = len(sample.content) - len(sample.content) // _HELD_OUT_ONE_IN
        files.append(TextFile(sample.origin, sample.content[:cut], held_out=False))
        files.append(TextFile(sample.origin, sample.content[cut:], held_out=True))
    return files
