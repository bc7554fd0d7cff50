"""Shards are cut as the streaming writer cuts them, before anything is computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.shard_plan import plan_shards


def _one_by_one(lengths: list[int], row_bytes: int, most: int) -> list[int]:
    bounds, filled = [0], 0
    for i, length in enumerate(lengths):
        if filled and filled + length * row_bytes > most:
            bounds.append(i)
            filled = 0
        filled += length * row_bytes
    return [*bounds, len(lengths)] if lengths else bounds


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 9), st.integers(1, 300))
def test_the_plan_is_that_of_a_writer_that_fills_shards_one_by_one(
    lengths: list[int], row_bytes: int, most: int
) -> None:
    bounds = plan_shards(lengths, row_bytes, most)
    assert bounds.dtype == np.int64
    assert bounds.tolist() == _one_by_one(lengths, row_bytes, most)


def test_bounds_by_hand() -> None:
    # Ten bytes a row, a hundred a shard: exactly full, one document alone beyond it, the rest.
    assert plan_shards([4, 6, 1, 11, 2, 8, 1], 10, 100).tolist() == [0, 2, 3, 4, 6, 7]


def test_offsets_beyond_32_bits() -> None:
    bounds = plan_shards(np.full(1000, 262_144, dtype=np.int32), 51_205, 1 << 40)
    assert bounds.tolist() == [0, *range(81, 1000, 81), 1000]


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="document 1 is empty"):
        plan_shards([3, 0, 5], 4, 100)
