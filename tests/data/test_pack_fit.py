"""Packs hold what they may, are alike, and windows do not depend on one another."""

import numpy as np
import pytest

from megatron_splitkv.data.pack_fit import fit_packs


def _log_normal(count: int, median: float, sigma: float, longest: int) -> np.ndarray:
    draws = np.random.default_rng(0).normal(np.log(median), sigma, count)
    return np.clip(np.exp(draws).astype(np.int64), 2, longest)


def _variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


@pytest.mark.parametrize("budget", [1.0, 1.25, None], ids=str)
def test_packs_are_full_and_alike(budget: float | None) -> None:
    tokens = _log_normal(8000, 1000, 1.0, 65536)
    anchors = np.minimum(512, tokens - 1)
    most = 10**9 if budget is None else int(budget * 65536 * anchors.sum() / tokens.sum())
    pack_of = fit_packs(tokens, anchors, 65536, most)
    held = np.bincount(pack_of, anchors)
    assert np.bincount(pack_of, tokens).max() <= 65536
    assert held.max() <= most
    assert held.min() > 0  # numbered without a gap
    assert tokens.sum() / (65536 * held.size) > 0.97
    assert _variation(held) < 0.1


def test_the_shortest_documents_do_not_make_a_pack_of_their_own() -> None:
    """They come last, where every pack has a gap that is too narrow for one of them."""
    tokens = _log_normal(20_000, 2000, 0.8, 16384)
    pack_of = fit_packs(tokens, np.zeros_like(tokens), 16384, 1)
    assert _variation(np.bincount(pack_of)) < 0.25


def test_a_small_case_by_hand() -> None:
    """Packs of five tokens for nine: the two that are needed, the emptiest takes the next."""
    assert fit_packs(np.array([1, 3, 2, 3]), np.zeros(4, int), 5, 1).tolist() == [1, 0, 0, 1]
    # Three documents of three do not pair: another pack, and all are dealt over the three again.
    tokens = np.array([3, 3, 3, 1])
    assert fit_packs(tokens, np.zeros(4, int), 5, 1).tolist() == [0, 1, 2, 0]
    # The emptier pack has not the anchors that the third one wants; the other has.
    assert fit_packs(np.array([6, 5, 3]), np.array([0, 2, 4]), 10, 5).tolist() == [0, 1, 0]


def test_documents_alone_in_their_packs() -> None:
    assert sorted(fit_packs(np.full(5, 7), np.zeros(5, int), 7, 1).tolist()) == [0, 1, 2, 3, 4]
    assert fit_packs(np.array([3]), np.array([2]), 7, 2).tolist() == [0]


def test_windows_that_are_fitted_together_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = _log_normal(5001, 1000, 1.0, 4096)
    anchors = np.minimum(64, tokens - 1)
    together = fit_packs(tokens, anchors, 4096, 200)
    monkeypatch.setattr("megatron_splitkv.data.pack_fit._CELLS", 1)  # one window after the other
    assert np.array_equal(fit_packs(tokens, anchors, 4096, 200), together)


def test_many_short_documents_share_a_wide_window() -> None:
    """A window of a thousand documents would hold but one pack, half empty."""
    tokens = np.full(200_000, 20)
    pack_of = fit_packs(tokens, np.zeros_like(tokens), 16384, 1)
    assert tokens.sum() / (16384 * (pack_of.max() + 1)) > 0.95
