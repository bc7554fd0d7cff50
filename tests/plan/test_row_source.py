"""The layouts are Megatron's own: its functions split a tensor of row numbers alike."""

import numpy as np
import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.row_positions import zigzag_positions
from megatron_splitkv.plan.row_source import RowSource

SIZES = [1, 2, 3, 4, 8]


def by_megatron(monkeypatch, cp_size, batch, **options):
    """`tokens` of Megatron's split at every rank of a group that need not exist."""
    from megatron.core import utils

    parts = []
    for rank in range(cp_size):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: cp_size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, rank=rank: rank)
        split = utils.get_batch_on_this_cp_rank(dict(batch), is_hybrid_cp=False, **options)
        parts.append(split["tokens"].flatten().tolist())
    return parts


def te_partitioned_indices(cu_seqlens, total_tokens, cp_size, rank):
    """Transformer Engine's indices, by the rule of its kernel, one row at a time.

    Source: `thd_partition_indices_kernel`. Of a rank's n rows of a document the first half lies
    `rank` halves, the second one 2 P - 2 - rank halves further back in it than in the rank.
    """
    bounds = [int(bound) // cp_size for bound in cu_seqlens]
    rows = []
    for token in range(total_tokens // cp_size):
        document = max(i for i, bound in enumerate(bounds[:-1]) if bound <= token)
        half = (bounds[document + 1] - bounds[document]) // 2
        index = token - bounds[document]
        halves = rank if index < half else 2 * cp_size - 2 - rank
        rows.append(bounds[document] * cp_size + index + half * halves)
    return torch.tensor(rows)


@pytest.mark.parametrize("cp_size", SIZES)
def test_the_whole_sequence_is_split_as_megatron_splits_it(monkeypatch, cp_size):
    length = 6 * cp_size
    source = RowSource.zigzag(length, cp_size)
    expected = by_megatron(
        monkeypatch, cp_size, {"tokens": torch.arange(length)[None], "cu_seqlens": None}
    )
    assert [source.rows(rank).tolist() for rank in range(cp_size)] == expected
    packed = {"tokens": torch.arange(length)[None], "cu_seqlens": torch.tensor([[0, 1, length]])}
    assert expected == by_megatron(monkeypatch, cp_size, packed, use_per_sequence_balancing=True)


@pytest.mark.parametrize("cp_size", SIZES)
def test_documents_are_split_as_megatron_splits_them(monkeypatch, cp_size):
    from megatron.core import utils

    class Extension:
        thd_get_partitioned_indices = staticmethod(te_partitioned_indices)

    monkeypatch.setattr(utils, "tex", Extension, raising=False)
    # Megatron's data sets fill the bounds up with copies of the last one.
    bounds = np.cumsum([0, 2, 0, 10, 4, 0, 0]) * cp_size
    batch = {
        "tokens": torch.arange(bounds[-1])[None],
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)[None],
        "cu_seqlens_padded": None,
    }
    source = RowSource.zigzag_documents(bounds, cp_size)
    expected = by_megatron(monkeypatch, cp_size, batch)
    assert [source.rows(rank).tolist() for rank in range(cp_size)] == expected
    positions = zigzag_positions(bounds, cp_size)
    assert all(np.array_equal(source.rows(rank), positions[rank]) for rank in range(cp_size))


def test_contiguous_parts():
    source = RowSource.contiguous(12, 3)
    assert [source.rows(rank).tolist() for rank in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert source.context_length == 12


@pytest.mark.parametrize("cp_size", SIZES)
def test_padding_of_documents_is_no_context(cp_size):
    lengths = np.array([2 * cp_size, 0, 1, 6 * cp_size - 3, 0, 4 * cp_size - 1])
    bounds = np.append(0, np.cumsum(-(-lengths // (2 * cp_size)) * 2 * cp_size))
    padded = RowSource.zigzag_documents(bounds, cp_size)
    source = RowSource.zigzag_documents(bounds, cp_size, lengths=lengths)
    # Row by row: where is each real row among all rows?
    real = np.full(bounds[-1], -1)
    is_real = np.concatenate(
        [np.arange(e - s) < n for s, e, n in zip(bounds[:-1], bounds[1:], lengths, strict=True)]
    )
    real[is_real] = np.arange(lengths.sum())
    assert source.context_length == lengths.sum()
    for rank in range(cp_size):
        rows = source.rows(rank)
        assert np.array_equal(np.where(rows < 0, -1, rows), real[padded.rows(rank)])
        assert source.num_rows(rank) == padded.num_rows(rank) == rows.size


def test_where_ranges_begin_in_their_tensors():
    source = RowSource.zigzag_documents([0, 8, 24], 2, lengths=[8, 13])
    for start, owner, local in zip(source.start, source.owner, source.local_start, strict=True):
        assert source.rows(owner)[local] == start


def test_ranks_may_hold_nothing():
    source = RowSource([3, 0], [5, 3], [1, 3], 5)
    assert [source.num_rows(rank) for rank in range(5)] == [0, 2, 0, 3, 0]
    assert source.rows(0).tolist() == []
    assert RowSource.zigzag(0, 4).context_length == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RowSource.contiguous(10, 4),
            "the context has 10 rows, no multiple of 4 .* pad it to 12",
        ),
        (
            lambda: RowSource.zigzag(12, 4),
            "the sequence has 12 rows, no multiple of 8 .* pad it to 16",
        ),
        (lambda: RowSource.zigzag(-4, 2), "context_length -4 must be at least 0"),
        (
            lambda: RowSource.zigzag_documents([0, 8, 13], 2),
            "document 1 has 5 rows, no multiple of 4 .* to 8",
        ),
        (lambda: RowSource.zigzag_documents([0, 8, 4], 2), "cu_seqlens must be a vector that"),
        (lambda: RowSource.zigzag_documents([0, 8], 2, lengths=[9]), "real rows of the documents"),
        (lambda: RowSource.zigzag(8, 0), "cp_size 0 must be at least 1"),
        (lambda: RowSource.contiguous(8, 0), "cp_size 0 must be at least 1"),
        (lambda: RowSource([0, 2], [2, 4], [0, 2], 2), r"ranks in \[0, 2\)"),
        (lambda: RowSource([0, 2], [2, 4], [1, 0], 2), "listed by rank"),
        (lambda: RowSource([0, 3], [2, 4], [0, 1], 2), "every row from 0 on exactly once"),
        (lambda: RowSource([0, 1], [2, 4], [0, 1], 2), "every row from 0 on exactly once"),
        (lambda: RowSource([0, 4], [4, 2], [0, 1], 2), "ends before it starts"),
        (lambda: RowSource([-2], [4], [0], 2), "half padding"),
        (lambda: RowSource([0], [4], [0, 1], 2), "vectors of one length"),
        (lambda: RowSource([0.7], [4], [0], 2), "start of a row source must hold integers"),
        (lambda: RowSource([0], [4], [True], 2), "owner of a row source must hold integers"),
        (lambda: RowSource([0], [4], [0], 2.0), "cp_size 2.0 must be at least 1, and an int"),
        (lambda: RowSource.zigzag(8.0, 2), "context_length 8.0 must be at least 0, and an int"),
        (lambda: RowSource.zigzag_documents([0, 8.5], 2), "cu_seqlens must hold integers, not fl"),
        (lambda: RowSource.zigzag_documents([0, 8], True), "cp_size True must be at least 1"),
        (lambda: RowSource.zigzag_documents([0, 8], 2, lengths=[7.5]), "must hold integers"),
        (lambda: zigzag_positions([0, 8, 13], 2), "document 1 has 5 rows, no multiple of 4 .* 8"),
        (lambda: zigzag_positions([0, 8.0], 2), "cu_seqlens must hold integers, not float64"),
        (lambda: RowSource.zigzag(8, 2).rows(2), r"rank 2 is not in \[0, 2\)"),
    ],
)
def test_bad_sources_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
