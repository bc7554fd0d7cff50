"""Layouts for the planner's tests, and their naive twins."""

import numpy as np

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan


def layout_of(documents, *, block_size):
    """`documents`: (length, anchors inside the document, padding blocks) each."""
    anchors, starts, keep = [], [], []
    start = 0
    for length, inside, padding in documents:
        anchors += [start + a for a in inside] + [start] * padding
        starts += [start] * (len(inside) + padding)
        keep += [True] * len(inside) + [False] * padding
        start += length
    return BlockLayout(anchors, starts, keep, block_size), start


def random_layout(seed, *, max_documents=5, max_length=90, max_anchors=40, block_size=None):
    """Documents of odd lengths, some empty, some without anchors; returns (layout, length)."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(rng.integers(1, max_documents + 1)):
        length = int(rng.integers(0, max_length))
        count = min(length, int(rng.integers(0, max_anchors)))
        inside = np.sort(rng.choice(length, count, replace=False)) if count else np.array([], int)
        documents.append((length, inside.tolist(), int(rng.integers(0, 4))))
    layout, end = layout_of(documents, block_size=block_size or int(rng.integers(1, 9)))
    return layout, end + int(rng.integers(0, 20))


def fig5_layout():
    """The paper's worked example: documents of 16 and 8, four anchors each, B = 2."""
    return layout_of([(16, [6, 10, 11, 12], 0), (8, [2, 4, 5, 6], 0)], block_size=2)


def a13_layout():
    """Documents [3072, 256, 256, 256, 256], anchors at every multiple of 64, B = 16."""
    documents = [(n, list(range(0, n, 64)), 0) for n in (3072, 256, 256, 256, 256)]
    return layout_of(documents, block_size=16)


def papers_layout(seed, documents=4, length=2**18, anchors=512):
    """The paper's workload: prompts of a quarter, anchors uniform behind them."""
    rng = np.random.default_rng(seed)
    supervised = np.arange(length // 4, length)
    drawn = [np.sort(rng.choice(supervised, anchors, False)) for _ in range(documents)]
    return layout_of([(length, inside.tolist(), 0) for inside in drawn], block_size=16)


def uneven_layout(seed, documents=12, length=2**20, anchors=2048):
    """Documents of log-normal lengths, anchors in proportion, prompts of any part."""
    rng = np.random.default_rng(seed)
    weight = rng.lognormal(0, 1, documents)
    lengths = (weight / weight.sum() * length).astype(int)
    lengths[-1] += length - lengths.sum()
    drawn = []
    for rows in lengths.tolist():
        supervised = np.arange(int(rows * rng.uniform(0.05, 0.6)) + 1, rows)
        count = min(max(1, anchors * rows // length), supervised.size)
        drawn.append((rows, np.sort(rng.choice(supervised, count, False)).tolist(), 0))
    return layout_of(drawn, block_size=16)


def visible(layout, rows):
    """bool[N, len(rows)]: the definition, one comparison per (block, row)."""
    rows = np.asarray(rows)[None, :]
    return (
        (layout.document_starts[:, None] <= rows)
        & (rows < layout.anchor_positions[:, None])
        & layout.block_keep_mask[:, None]
    )


def visible_in_window(layout, rows, window):
    """bool[N * B, len(rows)]: the same by query row, as far back as a window reaches."""
    size = layout.block_size
    position = layout.anchor_positions[:, None] + np.arange(size)
    near = position.reshape(-1, 1) - np.asarray(rows)[None, :] < window
    return visible(layout, rows).repeat(size, axis=0) & near


def shuffled(plan, seed):
    """The plan's blocks in no order, some of them turned into padding."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(plan.num_blocks)
    layout = BlockLayout(
        plan.layout.anchor_positions[order],
        plan.layout.document_starts[order],
        plan.layout.block_keep_mask[order] & (rng.random(order.size) < 0.8),
        plan.layout.block_size,
    )
    return ContextPlan(layout, plan.chunk_bounds, plan.chunk_owner, plan.cp_size, "none")


def random_plan(seed, cp_size):
    """A plan that no strategy would make: random cuts, random owners, ranks without rows."""
    layout, length = random_layout(seed)
    rng = np.random.default_rng(seed + 1000)
    cuts = np.sort(rng.integers(0, length + 1, rng.integers(0, 12)))
    bounds = np.concatenate([[0], cuts, [length]])
    owner = rng.integers(0, cp_size, bounds.size - 1)
    missing = -layout.num_blocks % cp_size
    padded = BlockLayout(
        np.pad(layout.anchor_positions, (0, missing)),
        np.pad(layout.document_starts, (0, missing)),
        np.pad(layout.block_keep_mask, (0, missing)),
        layout.block_size,
    )
    return ContextPlan(padded, bounds, owner, cp_size, "none")
