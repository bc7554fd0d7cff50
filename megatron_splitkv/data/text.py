"""Real text: the Python standard library on this machine, and files that a user names."""

import json
import re
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_splitkv.config import ConfigError

_HELD_OUT_ONE_IN = 32
_SURROGATE = re.compile("[\ud800-\udfff]")
# Tables of numbers and generated pages: not the text that a target should learn from.
_SKIPPED_FOLDERS = frozenset({"site-packages", "encodings", "pydoc_data"})


@dataclass(frozen=True)
class TextFile:
    """One file of text; `held_out` files are never trained on."""

    name: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Conversation:
    """A chat sample: alternating messages, each ``{"role", "content"}``."""

    messages: tuple[dict[str, str], ...]


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


def read_samples(paths: Sequence[str | Path]) -> list[str | Conversation]:
    """Samples of a user's files.

    ``*.jsonl``: one sample a line, either ``{"text": ...}`` or
    ``{"conversations": [{"role", "content"}, ...]}`` (``messages`` is read alike). Anything else
    is plain text, one sample a file.

    Raises:
        ConfigError: a file that cannot be read, or a broken line (named by its number).
    """
    samples: list[str | Conversation] = []
    for path in map(Path, paths):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text file {path} cannot be read: {error}") from error
        if path.suffix == ".jsonl":
            samples += [
                _parse_line(path, number, line)
                # Not splitlines(): a JSON text may hold other line separators, such as U+2028.
                for number, line in enumerate(text.split("\n"), start=1)
                if line.strip()
            ]
        elif text.strip():
            samples.append(text)
    if not samples:
        raise ConfigError(f"no text in {', '.join(map(str, paths))}")
    return samples


def _parse_line(path: Path, number: int, line: str) -> str | Conversation:
    try:
        sample = json.loads(line)
        if "text" in sample:
            return _encodable(sample["text"])
        messages = sample["conversations"] if "conversations" in sample else sample["messages"]
        return Conversation(
            tuple(
                {"role": _encodable(m["role"]), "content": _encodable(m["content"])}
                for m in messages
            )
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} line {number} is broken ({error!r}); a line is a JSON object with 'text' or "
            "'conversations'"
        ) from error


def _encodable(value: object) -> str:
    text = str(value)
    if has_lone_surrogate(text):
        raise ValueError("half of a surrogate pair is no text")
    return text


def has_lone_surrogate(text: str) -> bool:
    """Does a text hold half of a surrogate pair? JSON can write it, no tokenizer reads it."""
    return _SURROGATE.search(text) is not None


def files_as_text(paths: Sequence[str | Path]) -> list[TextFile]:
    """A user's plain text files, the last 1/32 of each held out.

    Raises:
        ConfigError: a file that cannot be read, or too little text.
    """
    files: list[TextFile] = []
    for path in map(Path, paths):
        for number, sample in enumerate(read_samples([path])):
            if not isinstance(sample, str):
                raise ConfigError(f"{path} holds conversations; this target reads plain text")
            cut = len(sample) - len(sample) // _HELD_OUT_ONE_IN
            files.append(TextFile(f"{path}:{number}", sample[:cut], held_out=False))
            files.append(TextFile(f"{path}:{number}", sample[cut:], held_out=True))
    return files
