"""Parts of a text, tokenised each for itself, give what tokenising the whole in order gives."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import text_units
from megatron_splitkv.data.chat import Encoded, encode_sample, encode_samples
from megatron_splitkv.data.document_units import unit_file
from megatron_splitkv.data.target import silent
from megatron_splitkv.data.text import Place, RawSample, read_from, read_samples
from megatron_splitkv.data.text_units import TextUnits, in_parts
from megatron_splitkv.data.tiny_target import byte_tokenizer
from megatron_splitkv.data.work import Worker, run_units

LIMIT = 50
UNITS = 9


def line(number: int) -> str:
    if number % 5 == 4:
        return json.dumps({"text": f"{number} " + "word\u2028" * number}, ensure_ascii=False)
    turns = [
        {"role": ("user", "assistant")[turn % 2], "content": f"{number}.{turn} " + "x" * number}
        for turn in range(2 + number % 2 * 2)
    ]
    return json.dumps({"conversations": turns})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lines with empty ones between them, plain texts, a byte order mark, no last newline."""
    monkeypatch.setattr(text_units, "_UNIT_BYTES", 600)
    monkeypatch.setattr(text_units, "_CALL_BYTES", 300)
    contents = {
        "a.jsonl": "\ufeff" + "\n\n".join(line(number) for number in range(20)),
        "b.txt": "plain \xe9\n",
        "c.txt": "\n",
        "d.jsonl": "".join(f"{line(number)}\n" for number in range(20, 31)),
        "e.txt": "long " * 300,
        "f.txt": "the end",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return [tmp_path / name for name in contents]


def encoder() -> Callable[[Sequence[RawSample]], list[Encoded]]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return lambda raws: encode_samples(tokenizer, raws, LIMIT, vocab_size=258)


def units_of(files: list[Path]) -> TextUnits:
    return TextUnits(files, [part for part, _ in in_parts(read_from(files))], encoder())


def same(one: Encoded | None, other: Encoded) -> None:
    assert one is not None
    assert torch.equal(one.sample.token_ids, other.sample.token_ids)
    assert torch.equal(one.sample.loss_mask, other.sample.loss_mask)
    assert (one.prompt_tokens, one.truncated) == (other.prompt_tokens, other.truncated)
    assert one.rewritten == other.rewritten


def test_the_units_hold_every_sample_as_if_alone(files: list[Path], tmp_path: Path) -> None:
    units, encode = units_of(files), encoder()
    raws = list(read_samples(files))
    assert sum(units.sizes) == len(raws) == 34
    assert len(units.sizes) == UNITS
    # The eighth goes on into the next file.
    assert {part.place.file for part in units.parts} == {0, 3, 5}
    for unit in range(len(units.sizes)):
        units.write(tmp_path, unit, silent)
    found = [document.encoded for document in units.read(tmp_path)]
    for document, raw in zip(found, raws, strict=True):
        same(document, encode([raw])[0])
    assert any(document is not None and document.truncated for document in found)
    assert any(document is not None and document.without_response for document in found)


def test_a_unit_reads_its_own_bytes_alone(files: list[Path]) -> None:
    units = units_of(files)
    (unit,) = [i for i, part in enumerate(units.parts) if part.place.line == 11]
    part = units.parts[unit]
    expected = units.make(unit, silent)
    content = files[0].read_bytes()
    files[0].write_bytes(b"\xff" * part.place.byte + content[part.place.byte :])
    for one, other in zip(units.make(unit, silent), expected, strict=True):
        assert other.encoded is not None
        same(one.encoded, other.encoded)


def test_a_refused_sample_is_named_by_file_and_line(files: list[Path]) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\xe9"}]
    bad = json.dumps({"conversations": turns})
    files[3].write_text("\n".join([line(20), line(21), "", line(22), bad, line(23)]))
    units = units_of(files)
    narrow = byte_tokenizer()
    narrow.chat_template = "{{ messages[-1]['content'] }}"
    units = TextUnits(
        files, units.parts, lambda raws: encode_samples(narrow, raws, LIMIT, vocab_size=258)
    )
    with pytest.raises(ConfigError, match=r"a\.jsonl line 1: .* template does not show"):
        units.make(0, silent)
    units = TextUnits(files, units.parts, lambda raws: [refusing(raw) for raw in raws])
    bad_place = next(
        each.place for each in read_from(files) if each.sample.origin == f"{files[3]} line 5"
    )
    before = [i for i, part in enumerate(units.parts) if order(part.place) <= order(bad_place)]
    with pytest.raises(ConfigError, match=r"d\.jsonl line 5: token 195 is outside"):
        units.make(before[-1], silent)


def order(place: Place) -> tuple[int, int]:
    return place.file, place.line


def refusing(raw: RawSample) -> Encoded:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    least = 195 if raw.origin.endswith("d.jsonl line 5") else 258
    return encode_sample(tokenizer, raw, LIMIT, vocab_size=least)


def test_a_text_that_changed_is_refused(files: list[Path]) -> None:
    files = files[:1]
    units = units_of(files)
    last = len(units.sizes) - 1
    place, samples = units.parts[last].place, units.sizes[last]
    files[0].write_bytes(files[0].read_bytes()[: place.byte])
    with pytest.raises(ConfigError, match=rf"has 0 samples from line {place.line} on, and had"):
        units.make(last, silent)
    assert samples > 0


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_killed_process_loses_one_unit(
    files: list[Path], tmp_path: Path, world_size: int
) -> None:
    units = units_of(files)
    made: list[int] = []

    def process(rank: int, killed_at: int | None) -> None:
        def write(unit: int) -> None:
            made.append(unit)
            if unit == killed_at:
                raise KeyboardInterrupt
            units.write(tmp_path, unit, silent)

        run_units(
            Worker(rank, world_size),
            len(units.sizes),
            lambda unit: unit_file(tmp_path, unit).exists(),
            write,
        )

    # The third unit of the last process.
    killed = 2 * world_size + world_size - 1
    with pytest.raises(KeyboardInterrupt):
        process(world_size - 1, killed)
    assert made == list(range(world_size - 1, killed + 1, world_size))
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("unit-*")}
    assert len(first) == 2
    for rank in reversed(range(world_size)):
        process(rank, None)
    assert sorted(made) == sorted([*range(UNITS), killed])
    assert first == {name: (tmp_path / name).stat().st_mtime_ns for name in first}
    again = [document.encoded for document in units.read(tmp_path)]
    for document, raw in zip(again, read_samples(files), strict=True):
        same(document, encoder()([raw])[0])


def test_reading_from_a_place_gives_the_rest(files: list[Path]) -> None:
    placed = list(read_from(files))
    assert placed[0].place == Place()
    assert [each.sample for each in placed] == list(read_samples(files))
    for number, each in enumerate(placed):
        assert list(read_from(files, each.place)) == placed[number:]
