"""Megatron's micro-batch in this package's terms: whose mask it is, and what is padding."""

import numpy as np
import pytest
import torch

from megatron_splitkv.batch import pack_from_megatron, row_source_from_megatron
from megatron_splitkv.config import ConfigError


def make_batch(loss_mask, cu_seqlens=None, padded=None, tokens=None):
    length = len(loss_mask)
    ids = torch.arange(100, 100 + length) if tokens is None else torch.tensor(tokens)
    batch = {"tokens": ids[None], "loss_mask": torch.tensor(loss_mask).float()[None]}
    for name, bounds in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", padded)):
        batch[name] = None if bounds is None else torch.tensor([bounds], dtype=torch.int32)
    return batch


def test_a_token_is_supervised_where_megatron_trains_its_prediction():
    """Megatron's mask at i is that of label i, token i + 1."""
    pack = pack_from_megatron(make_batch([0, 0, 1, 1, 0]), [7])
    assert pack.loss_mask.tolist() == [False, False, False, True, True]
    assert pack.token_ids.tolist() == [100, 101, 102, 103, 104]
    assert pack.cu_seqlens.tolist() == [0, 5]
    assert pack.document_ids.tolist() == [7]


def test_no_document_s_first_token_is_supervised():
    """Megatron's label at a document's end is the next one's first token."""
    pack = pack_from_megatron(make_batch([1] * 6, [0, 2, 6, 6, 6]), [4, 9])
    assert pack.loss_mask.tolist() == [False, True, False, True, True, True]
    assert pack.cu_seqlens.tolist() == [0, 2, 6]


def test_padding_belongs_to_documents_unless_it_is_told_apart():
    mask = [1, 1, 0, 0, 1, 0, 0, 0]
    kept = pack_from_megatron(make_batch(mask, [0, 4, 8, 8]), [1, 2])
    assert kept.cu_seqlens.tolist() == [0, 4, 8]
    assert kept.loss_mask.tolist() == [False, True, True, False, False, True, False, False]

    batch = make_batch(mask, [0, 3, 5, 5], [0, 4, 8, 8])
    pack = pack_from_megatron(batch, [1, 2])
    assert pack.cu_seqlens.tolist() == [0, 3, 5]
    assert pack.token_ids.tolist() == [100, 101, 102, 104, 105]
    assert pack.loss_mask.tolist() == [False, True, True, False, True]
    source = row_source_from_megatron(batch, 2)
    assert source.rows(0).tolist() == [0, -1, 3, -1]
    assert source.rows(1).tolist() == [1, 2, 4, -1]


def test_documents_of_nothing():
    batch = make_batch([1] * 8, [0, 0, 3, 3, 7], [0, 0, 4, 4, 8])
    pack = pack_from_megatron(batch, [1, 2, 3, 4])
    assert pack.cu_seqlens.tolist() == [0, 0, 3, 3, 7]
    assert pack.loss_mask.sum() == 5


def test_sources_follow_megatron_s_choice_of_balancing():
    batch = make_batch([1] * 12, [0, 4, 12])
    by_document = row_source_from_megatron(batch, 2)
    assert by_document.rows(0).tolist() == [0, 3, 4, 5, 10, 11]
    whole = row_source_from_megatron(batch, 2, use_per_sequence_balancing=True)
    assert whole.rows(0).tolist() == [0, 1, 2, 9, 10, 11]
    one = row_source_from_megatron(make_batch([1] * 12), 2)
    assert np.array_equal(one.rows(0), whole.rows(0))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(2, 8)}, r"tokens of the micro-batch has shape \(2, 8\)"),
        ({"tokens": None}, "the micro-batch lacks 'tokens'"),
        (make_batch([1] * 8, [0, 4, 6]), "8 tokens, 6 of them in documents"),
        (make_batch([1] * 8, [0, 3, 8]), "document 0 has 3 rows, no multiple of 4"),
    ],
)
def test_micro_batches_that_megatron_cannot_split_are_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        row_source_from_megatron(batch, 2)


def test_refused_packs():
    with pytest.raises(ConfigError, match="1 document_ids for 2 documents"):
        pack_from_megatron(make_batch([1] * 8, [0, 4, 8]), [1])
    with pytest.raises(ConfigError, match="lacks 'loss_mask'"):
        pack_from_megatron({"tokens": torch.zeros(1, 8)}, [1])
    padded = make_batch([1] * 8, [0, 3, 5], [0, 4, 8])
    with pytest.raises(ConfigError, match="8 tokens, 5 of them in documents"):
        row_source_from_megatron(padded, 2, use_per_sequence_balancing=True)
