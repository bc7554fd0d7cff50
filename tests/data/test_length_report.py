"""Lengths are counted exactly while documents stream by, and nothing left out goes uncounted."""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.corpus import supervised
from megatron_splitkv.data.length_report import Bin, LengthReport


def document(length: int, first: int = 0, truncated: int = 0, rewritten: int = 0) -> Encoded:
    sample = supervised(torch.zeros(length, dtype=torch.long), first)
    return Encoded(sample, truncated=truncated, rewritten=rewritten)


def report_of(*documents: Encoded) -> LengthReport:
    report = LengthReport()
    for each in documents:
        report.add(each)
    return report


def log_normal(count: int) -> LengthReport:
    lengths = np.random.default_rng(0).lognormal(8.5, 1.4, count).astype(int).clip(8, 262_144)
    report = LengthReport()
    for length in lengths.tolist():
        report.add(document(length, first=length // 4, truncated=40 * (length == 262_144)))
    return report


def test_sums_are_exact() -> None:
    report = report_of(document(5), document(9, 3, truncated=7, rewritten=2), document(4, 1))
    assert (report.documents, report.tokens, report.supervised_tokens) == (3, 18, 14)
    assert (report.shortest, report.longest) == (4, 9)
    assert (report.truncated, report.truncated_tokens, report.rewritten) == (1, 7, 2)
    assert report.without_response == 0


def test_what_has_no_response_is_left_out_and_counted() -> None:
    report = report_of(document(8, 8, truncated=5), document(6), document(8, 7, truncated=1))
    assert (report.without_response, report.without_response_tokens) == (2, 22)
    assert (report.documents, report.tokens, report.truncated) == (1, 6, 0)
    assert (report.shortest, report.longest) == (6, 6)


def test_bins_end_at_powers_of_two() -> None:
    report = report_of(*(document(n) for n in (2, 3, 4, 5, 8, 17, 32, 33)))
    assert report.bins() == [
        Bin(2, 2, 1, 2),
        Bin(3, 4, 2, 7),
        Bin(5, 8, 2, 13),
        Bin(9, 16, 0, 0),
        Bin(17, 32, 2, 49),
        Bin(33, 64, 1, 33),
    ]
    assert LengthReport().bins() == []


def test_bins_hold_every_document() -> None:
    lengths = [random.Random(1).randrange(2, 5000) for _ in range(300)]
    report = report_of(*map(document, lengths))
    for each in report.bins():
        inside = [n for n in lengths if each.shortest <= n <= each.longest]
        assert (each.documents, each.tokens) == (len(inside), sum(inside))
    assert sum(each.tokens for each in report.bins()) == report.tokens == sum(lengths)


def test_a_report_goes_on_from_its_json() -> None:
    first, second = document(9, 3, truncated=7), document(70, 69, truncated=1)
    values = json.loads(json.dumps(report_of(first).to_json()))
    report = LengthReport.from_json(values)
    report.add(second)
    assert report == report_of(first, second)


def test_text_histogram() -> None:
    report = report_of(*[document(7)] * 4, document(20, 10, truncated=3), document(9, 9, 1, 5))
    report.add(document(5, 1, rewritten=2))
    assert report.lines() == [
        "6 documents of 5 to 20 tokens, mean 9",
        "    length in tokens     documents                             share of tokens",
        "        5 -         8            5 ########################              62.3%",
        "        9 -        16            0                                        0.0%",
        "       17 -        32            1 #####                                 37.7%",
        "42 of 53 tokens carry loss",
        "1 document cut on the right, 3 tokens cut off",
        "1 document left out, as the prompt fills the sequence length",
        "2 responses without loss, changed or hidden by the chat template",
    ]


def test_lines_fit_a_terminal() -> None:
    report = log_normal(1000)
    report.documents += 10**9
    report.tokens += 10**14
    report.bin_documents[14] += 10**9
    report.truncated = report.without_response = report.rewritten = 10**9
    report.truncated_tokens = 10**14
    assert max(map(len, report.lines())) <= 80
    assert len(report.lines()) == 5 + len(report.bins()) + 1
    assert LengthReport().lines() == ["no documents"]


@pytest.mark.parametrize("count", [1, 400])
def test_drawing(tmp_path: Path, count: int) -> None:
    path = tmp_path / "lengths.png"
    log_normal(count).draw(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">2I", content[16:24]) == (960, 624)
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_nothing_is_a_picture_too(tmp_path: Path) -> None:
    LengthReport().draw(tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
