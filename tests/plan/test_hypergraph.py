"""The peer's planner: a legal plan, the same in every process; what it is asked to partition."""

import os
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import build_plan
from megatron_splitkv.plan.hypergraph import _nets
from megatron_splitkv.plan.strategies import equal_chunks
from tests.plan.layouts import layout_of, papers_layout, random_layout


@pytest.fixture
def _kahypar():
    pytest.importorskip("kahypar", reason="KaHyPar is not installed (extra: hypergraph)")


@pytest.mark.usefixtures("_kahypar")
@pytest.mark.parametrize("cp_size", [1, 2, 5, 8])
def test_every_row_once_and_rerun_agrees(cp_size):
    for seed in range(8):
        layout, length = random_layout(seed)
        plan = build_plan(layout, length, cp_size, strategy="hypergraph")
        rows = np.concatenate([plan.rows(rank) for rank in range(cp_size)])
        np.testing.assert_array_equal(np.sort(rows), np.arange(length))
        assert plan.work.sum() == build_plan(layout, length, cp_size).work.sum()
        assert build_plan(layout, length, cp_size, strategy="hypergraph").digest == plan.digest


@pytest.mark.usefixtures("_kahypar")
@pytest.mark.parametrize("layout", [BlockLayout([], [], [], 4), BlockLayout([0], [0], [True], 4)])
def test_nothing_to_see(layout):
    plan = build_plan(layout, 10, 3, strategy="hypergraph")
    assert sum(plan.num_rows(rank) for rank in range(3)) == 10


@pytest.mark.usefixtures("_kahypar")
def test_even_but_not_as_even_as_balanced():
    """Prices beyond 32 bits, which it must be given in a coarser unit."""
    layout, length = papers_layout(0, length=2**24, anchors=128)
    plan = build_plan(layout, length, 4, strategy="hypergraph", chunks_per_rank=16)
    assert plan.work.max() > 2**32
    balanced = build_plan(layout, length, 4, chunks_per_rank=16)
    assert balanced.imbalance < plan.imbalance < 0.01


PROCESS = """
from megatron_splitkv.plan import build_plan
from tests.plan.layouts import papers_layout
layout, length = papers_layout(1, length=2**14, anchors=64)
print(build_plan(layout, length, 4, strategy="hypergraph", chunks_per_rank=8).digest)
"""


@pytest.mark.usefixtures("_kahypar")
def test_processes_agree():
    digests = [
        subprocess.run(
            [sys.executable, "-c", PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for seed in ("0", "77")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 65  # and it prints nothing of its own


def test_nets_are_groups_of_blocks_and_the_chunks_that_they_see():
    """Blocks of 64 rows, so two a net; 5 blocks on rank 0, 5 on rank 1; chunks of 10 rows."""
    layout, length = layout_of([(60, [5, 15, 40], 1), (40, [0, 11, 12, 39], 2)], block_size=64)
    rows, net_start, pins = _nets(layout, equal_chunks(length, 10), 2)
    # Rank 0 owns 5, 15, 40, a padding block and 60 (sees nothing); rank 1 the rest of document 2.
    assert rows.tolist() == [128, 64, 128, 64]
    nets = [net.tolist() for net in np.split(pins, net_start[1:-1])]
    assert net_start.tolist() == [0, 3, 8, 11, 16]
    # Ten chunks, then the two ranks.
    assert nets == [[0, 1, 10], [0, 1, 2, 3, 10], [6, 7, 11], [6, 7, 8, 9, 11]]


def test_missing_package():
    layout, length = papers_layout(0, length=2**10, anchors=8)
    message = r'pip install "megatron-splitkv\[hypergraph\]"'
    with patch.dict(sys.modules, {"kahypar": None}), pytest.raises(ConfigError, match=message):
        build_plan(layout, length, 4, strategy="hypergraph")
