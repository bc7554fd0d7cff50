import random

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout, select_anchors


def draw(loss_mask, cu_seqlens, *, sample_ids=None, **keywords):
    """`select_anchors` with small defaults."""
    call = {"num_anchors": 4, "block_size": 4, "seed": 1, "step": 0} | keywords
    if sample_ids is None:
        sample_ids = range(len(cu_seqlens) - 1)
    return select_anchors(loss_mask, cu_seqlens, sample_ids=sample_ids, **call)


def kept(layout):
    return layout.anchor_positions[layout.block_keep_mask].tolist()


def test_candidates_are_pairs_of_supervised_tokens_in_one_document():
    #            0  1  2  3  4  5 | 6  7  8  9 | 10 11
    mask = np.array([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
    layout = draw(mask, [0, 6, 10, 12], num_anchors=5)
    assert kept(layout) == [1, 4, 6, 10]  # not 5 (its successor is in the next document), not 9


def test_layout_per_document_is_kept_ascending_then_padding_at_the_start():
    layout = draw(np.ones(12, bool), [0, 3, 12], num_anchors=3)
    assert layout.document_starts.tolist() == [0, 0, 0, 3, 3, 3]
    assert layout.block_keep_mask.tolist() == [True, True, False, True, True, True]
    assert layout.anchor_positions[:3].tolist() == [0, 1, 0]
    assert (np.diff(layout.anchor_positions[3:]) > 0).all()
    for array, dtype in (
        (layout.anchor_positions, np.int64),
        (layout.document_starts, np.int64),
        (layout.block_keep_mask, np.bool_),
    ):
        assert array.dtype == dtype
    assert (layout.block_size, layout.num_blocks) == (4, 6)


def test_documents_with_one_candidate_none_and_no_token():
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 0, 1], dtype=bool)
    layout = draw(mask, [0, 4, 4, 8, 9], num_anchors=2)
    assert layout.document_starts.tolist() == [0, 0, 4, 4, 4, 4, 8, 8]
    assert layout.block_keep_mask.tolist() == [True] + [False] * 7
    assert layout.anchor_positions.tolist() == [2, 0, 4, 4, 4, 4, 8, 8]


def test_no_document_and_no_supervision():
    assert draw(np.ones(5, bool), [0]).num_blocks == 0
    assert draw(np.zeros(0, bool), [0, 0]).block_keep_mask.tolist() == [False] * 4
    layout = draw(np.zeros(9, bool), [0, 9])
    assert not layout.block_keep_mask.any()
    assert layout.anchor_positions.tolist() == [0] * 4


def test_mask_may_outlast_the_documents_and_be_a_tensor():
    mask = np.ones(20, bool)
    expected = draw(mask, [0, 8])
    again = draw(torch.from_numpy(mask), torch.tensor([0, 8]), sample_ids=torch.tensor([0]))
    assert kept(again) == kept(expected)
    assert max(kept(expected)) < 7


def test_uniform_without_replacement():
    """Ten candidates, three drawn: every candidate and every pair equally often, to 5 sigma."""
    single, pairs, draws = np.zeros(10), np.zeros((10, 10)), 4000
    for step in range(draws):
        chosen = kept(draw(np.ones(11, bool), [0, 11], num_anchors=3, step=step))
        assert len(set(chosen)) == 3
        single[chosen] += 1
        pairs[np.ix_(chosen, chosen)] += 1
    assert_binomial(single, draws, 3 / 10)
    assert_binomial(pairs[np.triu_indices(10, 1)], draws, 3 / 10 * 2 / 9)


def assert_binomial(counts, draws, probability):
    sigma = np.sqrt(draws * probability * (1 - probability))
    assert np.abs(counts - draws * probability).max() < 5 * sigma
    assert counts.std() > sigma / 3  # and it is random, not dealt out in turn


def test_a_document_keeps_its_anchors_wherever_it_is_packed():
    rng = np.random.default_rng(0)
    lengths = {7: 40, 8: 90, 9: 65}
    masks = {sample: rng.random(n) < 0.7 for sample, n in lengths.items()}

    def inside(samples):
        cu = np.cumsum([0] + [lengths[s] for s in samples])
        layout = draw(np.concatenate([masks[s] for s in samples]), cu, sample_ids=samples)
        local = (layout.anchor_positions - layout.document_starts).reshape(-1, 4).tolist()
        return dict(zip(samples, local, strict=True))

    alone = {sample: inside([sample])[sample] for sample in lengths}
    assert inside([9, 7, 8]) == alone
    assert inside([8, 9]) == {8: alone[8], 9: alone[9]}


def test_seed_step_and_sample_id_all_matter():
    mask, cu = np.ones(1000, bool), [0, 1000]
    keys = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    # 64-bit keys neither collide nor run into their neighbours.
    keys += [(2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**32), (2**63 - 1, 2**63 - 1, 2**63 - 1)]
    draws = [
        tuple(kept(draw(mask, cu, seed=seed, step=step, sample_ids=[sample])))
        for seed, step, sample in keys
    ]
    assert len(set(draws)) == len(keys)


def test_the_draw_is_pinned():
    """A resumed run must draw what the uninterrupted one would, after an upgrade as well."""
    layout = draw(np.ones(100, bool), [0, 60, 100], seed=1234, step=5, sample_ids=[17, 2**40])
    assert kept(layout) == [13, 32, 36, 47, 61, 73, 85, 91]


def test_a5_ranks_of_a_group_draw_the_same_whatever_used_the_generators():
    """dp = 2 x cp = 2 (and tp = 2): equal inside a replica, different between replicas."""
    mask, cu = np.ones(500, bool), [0, 200, 500]
    packs = {0: [[4, 9], [1, 3], [0, 2], [8, 5], [7, 6]], 1: [[14, 19], [11, 13], [10, 12]] * 2}
    recorded = {}
    for rank in range(8):
        torch.manual_seed(rank)
        torch.rand(rank + 1)
        np.random.seed(rank)  # noqa: NPY002  # the global generator, on purpose
        random.seed(rank)
        replica = rank // 4
        recorded[rank] = [
            kept(draw(mask, cu, step=step, sample_ids=packs[replica][step])) for step in range(5)
        ]
    states = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    draw(mask, cu)
    assert (states[0] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert torch.equal(states[1], torch.get_rng_state())
    for replica in (0, 1):
        group = [recorded[rank] for rank in range(4 * replica, 4 * replica + 4)]
        assert group == [group[0]] * 4
    assert all(a != b for a, b in zip(recorded[0], recorded[4], strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_anchors": 0}, "num_anchors 0 must be at least 1"),
        ({"block_size": 1}, "block_size 1 must be at least 2"),
        ({"cu_seqlens": []}, "must begin at 0"),
        ({"cu_seqlens": [1, 8]}, "must begin at 0"),
        ({"cu_seqlens": [0, 5, 3]}, "never decrease"),
        ({"cu_seqlens": [0, 11]}, "end at 11, but loss_mask has 10"),
        ({"cu_seqlens": [0, 4.5]}, "cu_seqlens must hold integers, not float64"),
        ({"loss_mask": np.ones((2, 5))}, r"loss_mask must be a vector, not of shape \(2, 5\)"),
        ({"sample_ids": [1, 2]}, "2 sample_ids for 1 documents"),
        ({"sample_ids": [-1]}, r"sample id -1 must be in \[0, 2\*\*63\)"),
        ({"seed": -1}, "seed -1 must be in"),
        ({"step": 2**63}, "step 9223372036854775808 must be in"),
    ],
)
def test_bad_input(arguments, message):
    call = {"loss_mask": np.ones(10, bool), "cu_seqlens": [0, 10]} | arguments
    with pytest.raises(ConfigError, match=message):
        draw(call.pop("loss_mask"), call.pop("cu_seqlens"), **call)


@pytest.mark.parametrize(
    ("anchors", "starts", "keep", "size", "message"),
    [
        ([1], [0, 0], [True], 4, "have 1, 2 and 1 entries"),
        ([1], [0], [True], 0, "block_size 0 must be at least 1"),
        ([-1], [-1], [False], 4, "must not be negative"),
        ([3, 1], [0, 2], [True, True], 4, "block 1: anchor 1 lies before the start 2"),
        ([1.5], [0], [True], 4, "anchor_positions must hold integers"),
    ],
)
def test_bad_layouts(anchors, starts, keep, size, message):
    with pytest.raises(ConfigError, match=message):
        BlockLayout(anchors, starts, keep, size)


def test_a_layout_does_not_change_with_its_inputs():
    anchors = np.array([3, 5])
    layout = BlockLayout(anchors, [0, 0], [True, True], 4)
    anchors[0] = 4
    assert layout.anchor_positions.tolist() == [3, 5]


def test_without_padding_leaves_the_kept_blocks():
    layout = draw(np.ones(12, dtype=bool), [0, 3, 12], num_anchors=5)
    compact = layout.without_padding()
    assert compact.anchor_positions.tolist() == kept(layout)
    assert compact.document_starts.tolist() == [0, 0, 3, 3, 3, 3, 3]
    assert compact.block_keep_mask.all()
    assert compact.block_size == layout.block_size


def test_without_padding_leaves_one_block_where_nothing_is_kept():
    compact = draw(np.zeros(12, dtype=bool), [0, 3, 12]).without_padding()
    assert compact.block_keep_mask.tolist() == [False]
