"""Documents as rows that blocks see, and their tails, against one row after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan.documents import Documents
from tests.plan.layouts import layout_of, random_layout, visible


def price_of_rows(layout, length):
    return layout.block_size * visible(layout, np.arange(length)).sum(axis=0)


@pytest.mark.parametrize("seed", range(30))
def test_documents_by_definition(seed):
    layout, length = random_layout(seed, max_documents=8)
    documents, price = Documents.of(layout), price_of_rows(layout, length)
    sees = visible(layout, np.arange(length)).any(axis=1)
    starts = np.unique(layout.document_starts[sees])
    np.testing.assert_array_equal(documents.start, starts)
    for d, start in enumerate(starts):
        mine = sees & (layout.document_starts == start)
        assert documents.end[d] == layout.anchor_positions[mine].max()
        assert documents.work[d] == price[start : documents.end[d]].sum()
        assert documents.blocks[d] == mine.sum()
        np.testing.assert_array_equal(documents.of_block == d, mine)
    assert (documents.of_block[~sees] == -1).all()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**20), data=st.data())
def test_tail_is_the_longest_within_its_limits(seed, data):
    layout, length = random_layout(seed)
    documents, price = Documents.of(layout), price_of_rows(layout, length)
    seen = visible(layout, np.arange(length))
    if not documents.start.size:
        return
    d = data.draw(st.integers(0, documents.start.size - 1))
    start, end = int(documents.start[d]), int(documents.end[d])
    end = data.draw(st.integers(start, end))
    work = data.draw(st.integers(0, int(price[start:end].sum()) + 5))
    blocks = data.draw(st.integers(0, int(documents.blocks[d])))
    rows = data.draw(st.integers(0, end - start + 3))

    def allowed(first):
        return (
            price[first:end].sum() <= work
            and end - first <= rows
            and (first == end or seen[:, first].sum() <= blocks)
        )

    first, moved = documents.tail(d, end, work, blocks, rows)
    assert first == min(x for x in range(start, end + 1) if all(map(allowed, range(x, end + 1))))
    assert moved == price[first:end].sum()
    if first < end:
        assert documents.seen_by(d, first) == seen[:, first].sum()


def test_products_beyond_int64():
    """Prices near 2**50 and documents of 2**30 rows."""
    start = 2**40
    layout, _ = layout_of([(start, [], 0), (2**31, [2**30, 2**31 - 1], 0)], block_size=2**20)
    documents = Documents.of(layout)
    end = int(documents.end[0])
    first, moved = documents.tail(0, end, 2**49 + 5, 2, 2**31)
    assert (end - first, moved) == (2**29, 2**49)


def test_with_windows_the_work_adds_up():
    layout, _ = layout_of([(4000, list(range(1000, 4000, 50)), 0)], block_size=4)
    documents = Documents.of(layout, (None, 64))
    half = int(documents.work[0]) // 2
    first, moved = documents.tail(0, int(documents.end[0]), half, 60, 4000)
    rest, remaining = documents.tail(0, first, 2 * half, 60, 4000)
    assert rest == 0
    assert moved + remaining == documents.work[0]
    assert abs(moved - half) <= 0.01 * half
