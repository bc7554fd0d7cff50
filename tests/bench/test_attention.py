"""`splitkv bench attention`: what it computes, that it is faster, what it writes and refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_splitkv.attention.kernels import cpu
from megatron_splitkv.bench import AttentionShape, bench_attention, print_benchmark
from megatron_splitkv.bench.attention import IDEAL, MASKED, OURS
from megatron_splitkv.cli import main
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import build_staircase

TINY = AttentionShape(queries=64, context=256, heads=4, kv_heads=2, head_dim=16, block_size=8)
TINY_ARGUMENTS = "--queries 64 --context 256 --heads 4 --kv-heads 2 --head-dim 16 --block-size 8"


def test_what_it_says() -> None:
    threads = torch.get_num_threads()
    result = bench_attention(TINY, threads=threads + 1, repeats=3)
    assert torch.get_num_threads() == threads
    assert result.difference < 1e-5
    assert result.needed_pairs == 8 * TINY.anchors().sum()
    said = result.to_json()
    for clock in ("cpu", "wall"):
        total = said["seconds"]["unmasked"][clock]["total"]["median"]
        assert said["seconds"][IDEAL][clock]["total"]["median"] == pytest.approx(
            total * said["density"]
        )
    ratio = result.values(OURS, "total") / result.values(MASKED, "total")
    assert said["ratios"]["cpu_over_dense_mask"]["total"]["median"] == np.median(ratio)
    json.dumps(said)


@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_anchors_have_the_density(density: float) -> None:
    anchors = AttentionShape(density=density).anchors()
    assert anchors.mean() / 8192 == pytest.approx(density, rel=0.01)
    assert anchors.min() >= 1
    assert anchors.max() <= 8192
    assert (np.diff(anchors) >= 0).all()


def test_work_of_the_default_shape() -> None:
    anchors = AttentionShape().anchors()
    staircase = build_staircase(np.zeros_like(anchors), anchors, 16, cpu.LEAF_LIMITS)
    assert 1 < staircase.executed_pairs / staircase.needed_pairs <= 1.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    result = bench_attention(AttentionShape(64, 256, 2, 1, 16, 16, dtype=dtype), repeats=1)
    assert result.difference < 0.02


def test_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    had_pyplot = "matplotlib.pyplot" in sys.modules
    folder = tmp_path / "new" / "folder"
    arguments = ["bench", "attention", *TINY_ARGUMENTS.split(), "--repeats", "2"]
    assert main([*arguments, "--output", str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "our cpu kernel" in printed
    assert "ours / SDPA, dense mask: forward" in printed
    assert sorted(file.name for file in folder.iterdir()) == ["attention.json", "attention.png"]
    assert (folder / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.keys() == json.loads((folder / "attention.json").read_text()).keys()
    assert said["shape"]["kv_heads"] == 2
    assert said["threads"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--queries 20", "20 queries are not a multiple of the block size 8"),
        ("--heads 3", "3 heads do not divide among 2 key-value heads"),
        ("--density 0", "density 0.0 must be in (0, 1]"),
        ("--dtype int8", "dtype 'int8' is not known; use float32"),
        ("--context 0", "context 0 must be at least 1"),
        ("--repeats 0", "repeats 0 and threads 1 must be at least 1"),
        ("--seed -1", "seed -1 must not be negative"),
    ],
)
def test_bad_input(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *TINY_ARGUMENTS.split(), *options.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.strip().splitlines()[-1].startswith("splitkv bench: ")


def test_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_benchmark(bench_attention(TINY, repeats=1))
    assert "dense mask" in capsys.readouterr().out


def test_shape_is_checked_in_python_too() -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        AttentionShape(queries=17)
