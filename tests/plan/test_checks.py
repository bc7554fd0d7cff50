"""Layouts are refused exactly if a kept block would see what is not of its document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.checks import check_layout, check_windows

BLOCKS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans()), min_size=1, max_size=6
)


def is_legal(starts, anchors, keep, length):
    """Block by block: the context ends behind its anchor, and no document begins before it."""
    if max(starts) > length:
        return False
    return all(
        anchor < length and not any(start < other <= anchor for other in starts)
        for start, anchor, kept in zip(starts, anchors, keep, strict=True)
        if kept
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(BLOCKS, st.booleans(), st.integers(8, 30))
def test_equals_block_by_block(blocks, in_order, length):
    starts = [6 * document for document, _, _ in blocks]
    if in_order:
        starts.sort()
    keep = [kept for _, _, kept in blocks]
    anchors = [
        start + offset * (offset < 7 or length % 3 == 0)
        for start, (_, offset, _) in zip(starts, blocks, strict=True)
    ]
    layout = BlockLayout(anchors, starts, keep, 2)
    if is_legal(starts, anchors, keep, length):
        check_layout(layout, length)
    else:
        with pytest.raises(ConfigError, match=r"beyond the context|does not lie in the document"):
            check_layout(layout, length)


def test_windows_are_a_tuple():
    assert check_windows([None, 3]) == (None, 3)
    for wrong in ((), "512", np.array([3]), None):
        with pytest.raises(ConfigError, match="must have an entry for every layer"):
            check_windows(wrong)
