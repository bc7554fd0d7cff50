"""What a staircase computes, counted pair by pair."""

import numpy as np


def columns(rectangles):
    return np.stack(
        [rectangles.q_start, rectangles.q_end, rectangles.k_start, rectangles.k_end], axis=1
    ).tolist()


def cells(staircase):
    """All rectangles and leaves."""
    return [c for part in (*staircase.levels, staircase.leaves) for c in columns(part)]


def count_coverage(staircase, num_keys):
    """How often the rectangles compute each (query row, local key)."""
    size = staircase.block_size
    count = np.zeros((staircase.num_rows, num_keys), dtype=int)
    for level in staircase.levels:
        for q0, q1, k0, k1 in columns(level):
            count[q0 * size : q1 * size, k0:k1] += 1
    for q0, q1, k0, k1 in columns(staircase.leaves):
        for row in range(q0 * size, q1 * size):
            first, last = int(staircase.row_start[row]), int(staircase.row_end[row])
            count[row, max(first, k0) : min(last, k1)] += 1
    return count


def assert_disjoint_and_ascending(rectangles, *, keys=True):
    assert (rectangles.q_start < rectangles.q_end).all()
    assert (rectangles.k_start < rectangles.k_end).all()
    assert (rectangles.q_end[:-1] <= rectangles.q_start[1:]).all()
    if keys:
        assert (rectangles.k_end[:-1] <= rectangles.k_start[1:]).all()
