"""Links of a machine from measured patterns: the fit, two gloo ranks, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_splitkv.bench.link_fit import (
    PATTERNS,
    Sample,
    by_pattern,
    fit_links,
    fit_pattern,
    model_error,
    predicted_seconds,
)
from megatron_splitkv.bench.links import Effort, LinksBenchmark, measure_links
from megatron_splitkv.bench.links_report import print_links
from megatron_splitkv.cli import main
from megatron_splitkv.comm.links import PRESETS, Links, links_from
from megatron_splitkv.testing import gloo_pool

SIZES = (2**12, 2**16, 2**20, 2**24, 2**27)
# Two nodes of four ranks that share two cards.
MACHINE = replace(
    PRESETS["nvlink-400g"], ranks_per_node=4, nics_per_node=2, nic_bandwidth=2e10, name="machine"
)


def samples_of(links: Links, within: bool, ranks: int, noise: float = 0.0) -> list[Sample]:
    samples = []
    for i, pattern in enumerate(PATTERNS):
        for j, size in enumerate(SIZES):
            sample = Sample(pattern, within, ranks, size, 1.0, 1.0, 1.0)
            seconds = predicted_seconds(sample, links) * (1 + noise * (-1) ** (i + j))
            samples.append(replace(sample, seconds=seconds, low=seconds, high=seconds))
    return samples


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_finds_the_machine_that_made_the_times(noise: float) -> None:
    samples = samples_of(MACHINE, True, 4, noise) + samples_of(MACHINE, False, 8, noise)
    start = replace(PRESETS["pcie-ethernet"], ranks_per_node=4, name="start", nics_per_node=1)
    found = fit_links(samples, start)
    for name in ("intra_latency", "intra_bandwidth", "inter_latency", "nic_bandwidth"):
        expected = getattr(MACHINE, name)
        assert getattr(found, name) == pytest.approx(expected, rel=1e-3 + 2 * noise), name
    assert found.nics_per_node == 2
    assert (found.name, found.dense_flops) == ("start", start.dense_flops)
    assert model_error(samples, found) < 1e-3 + 1.2 * noise


def test_what_was_not_measured_stays() -> None:
    found = fit_links(samples_of(MACHINE, True, 4), PRESETS["pcie-ethernet"])
    assert found.inter_latency == PRESETS["pcie-ethernet"].inter_latency
    assert found.nic_bandwidth == PRESETS["pcie-ethernet"].nic_bandwidth
    assert found.intra_latency == pytest.approx(MACHINE.intra_latency, rel=1e-3)


def test_a_line_weighs_small_and_large_messages_alike() -> None:
    shares = {"hop": 1.0, "all_reduce": 1.5, "all_gather": 0.75, "all_to_all": 0.75}
    for pattern, share in shares.items():
        made = [
            Sample(pattern, True, 4, size, 1e-5 + size * share / 1e9, 0.0, 0.0) for size in SIZES
        ]
        fit = fit_pattern(made)
        assert fit.latency == pytest.approx(1e-5, rel=1e-6)
        assert fit.bandwidth == pytest.approx(1e9, rel=1e-6)
        assert fit.error < 1e-9
    flat = fit_pattern([Sample("hop", True, 2, size, 1e-3, 0.0, 0.0) for size in SIZES])
    assert flat.latency == pytest.approx(1e-3)


def measure_two_nodes() -> LinksBenchmark:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return measure_links(Effort((64, 4096), 1), "two nodes")
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]


def test_nodes_and_the_whole_are_measured_apart() -> None:
    results = gloo_pool(4).run(measure_two_nodes)
    assert all(result == results[0] for result in results)
    found = results[0]
    assert {(s.within, s.ranks) for s in found.samples} == {(True, 2), (False, 4)}
    assert len(found.samples) == 2 * len(PATTERNS) * 2
    assert found.links.ranks_per_node == 2
    assert found.assumed == ()
    assert [fit.pattern for fit in found.fits] == [*PATTERNS, *PATTERNS]
    # What is asked for is what a rank sends.
    for sample in found.samples:
        assert 0.9 < sample.sent / min((64, 4096), key=lambda size: abs(size - sample.sent)) < 1.1


def test_the_command_writes_a_file_that_others_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "here.json", tmp_path / "report"
    argv = ["bench", "links", "--sizes", "4096,65536", "--repeats", "2", "--name", "here"]
    assert main([*argv, "--save", str(file), "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "Links of 2 ranks, gloo" in shown
    assert f"--links {file}" in shown
    links = links_from(str(file))
    assert links.name == "here"
    assert links.inter_latency == links.intra_latency  # one machine
    assert 0 < links.call_latency < 1
    assert links.ranks_per_node == PRESETS["loopback"].ranks_per_node
    report = json.loads((folder / "links.json").read_text())
    assert Links(**report["links"]) == links
    assert (report["ranks"], report["backend"], report["not_measured"]) == (2, "gloo", [])
    assert len(report["samples"]) == len(PATTERNS) * 2
    assert (folder / "links.png").stat().st_size > 1000


def test_a_model_that_misses_what_was_measured_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All-to-alls that take twice as long as the links explain, all else as they do."""
    samples = samples_of(MACHINE, True, 4)
    off = [replace(s, seconds=2 * s.seconds) if s.pattern == "all_to_all" else s for s in samples]
    lines = [fit_pattern(group) for group in by_pattern(off)]
    result = LinksBenchmark(MACHINE, 4, "gloo", tuple(off), tuple(lines), ())
    assert [fit.pattern for fit in result.misfits] == ["all_to_all"]
    assert result.to_json()["misfits"] == [["all_to_all", True, pytest.approx(0.5)]]
    print_links(result)
    assert "warning: the model is off by more than 25%: all_to_all among 4 of a node by 50%" in (
        capsys.readouterr().out
    )
    fine = [fit_pattern(group) for group in by_pattern(samples)]
    print_links(LinksBenchmark(MACHINE, 4, "gloo", tuple(samples), tuple(fine), ()))
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "1"], "--ranks 1 must be from 2 to 8"),
        (["--ranks", "9"], "--ranks 9 must be from 2 to 8"),
        (["--sizes", "4k"], "--sizes '4k' is not a list of bytes"),
        (["--sizes", "4096"], "two different sizes"),
        (["--sizes", "0,4096"], "at least 1"),
        (["--repeats", "0"], "repeats 0 must be at least 1"),
        (["--name", ""], "--name is empty"),
        (["--save", "no/such/folder/x.json"], "no file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "links", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_launched_ranks_but_the_first_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "links", "--ranks", "2"]) == 2
    assert "for a run without torchrun, which has started 2 ranks" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        main(["bench", "links", "--ranks", "2"])
    assert left.value.code == 2
    assert capsys.readouterr().err == ""
