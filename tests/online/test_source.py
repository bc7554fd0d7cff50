"""Who runs which documents: pure, even by estimated cost, whole documents, in the pack's order."""

import itertools

import numpy as np
import pytest

from megatron_splitkv.online.source import document_owners, documents_source
from megatron_splitkv.plan.row_source import RowSource


def _bounds(*lengths: int) -> np.ndarray:
    return np.append(0, np.cumsum(lengths)).astype(np.int64)


def test_the_costliest_document_goes_to_the_least_loaded_rank() -> None:
    # n (n + 100): 10 -> 1100, 30 -> 3900, 20 -> 2400, 40 -> 5600, 5 -> 525
    assert document_owners(_bounds(10, 30, 20, 40, 5), 2, 100).tolist() == [0, 1, 1, 0, 1]
    # n^2 alone: 900 + 400 + 100 are less than 1600
    assert document_owners(_bounds(10, 30, 20, 40, 5), 2, 0).tolist() == [1, 1, 1, 0, 1]


def test_long_documents_cost_more_than_their_rows_say() -> None:
    """One of 64 against 64 of one: by rows even, by attention all short ones on the other rank."""
    owners = document_owners(_bounds(64, *[1] * 64), 2, 0)
    assert owners.tolist() == [0] + [1] * 64
    by_rows = document_owners(_bounds(64, *[1] * 64), 2, 10**9)
    assert np.bincount(by_rows).tolist() == [1, 64]


def test_no_assignment_is_much_more_even() -> None:
    """The bound of longest processing time first, against all assignments."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        bounds = _bounds(*generator.integers(1, 90, size=7))
        lengths = np.diff(bounds)
        cost = lengths * (lengths + 50)
        load = np.bincount(document_owners(bounds, 3, 50), cost, minlength=3).max()
        best = min(
            np.bincount(owners, cost, minlength=3).max()
            for owners in itertools.product(range(3), repeat=7)
        )
        assert load <= (4 / 3 - 1 / 9) * best


def test_equal_documents_are_dealt_by_index() -> None:
    assert document_owners(_bounds(7, 7, 7, 7, 7), 3, 10).tolist() == [0, 1, 2, 0, 1]


def test_ranks_may_have_nothing() -> None:
    owners = document_owners(_bounds(5, 9), 4, 10)
    assert owners.tolist() == [1, 0]
    source = documents_source(_bounds(5, 9), owners, 4)
    assert [source.num_rows(rank) for rank in range(4)] == [9, 5, 0, 0]


def test_a_rank_has_its_documents_in_the_packs_order() -> None:
    bounds = _bounds(4, 2, 3, 1)
    source = documents_source(bounds, np.array([1, 0, 1, 0]), 2)
    assert isinstance(source, RowSource)
    assert source.rows(0).tolist() == [4, 5, 9]
    assert source.rows(1).tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert source.context_length == 10


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
def test_every_row_is_on_one_rank(cp_size: int) -> None:
    bounds = _bounds(*np.random.default_rng(1).integers(1, 60, size=12))
    source = documents_source(bounds, document_owners(bounds, cp_size, 30), cp_size)
    rows = np.concatenate([source.rows(rank) for rank in range(cp_size)])
    assert np.array_equal(np.sort(rows), np.arange(bounds[-1]))
