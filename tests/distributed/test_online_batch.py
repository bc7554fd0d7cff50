"""Tokens through Megatron's loader path and rows in Megatron's layout: the batch of the store.

The offline way reads a pack from a feature store. Here the same documents come as Megatron hands
them out: on the first tensor-parallel rank alone, padded for context parallelism, broadcast, split
by Megatron's own function; and a pretended target makes features from Megatron's rows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.batch import (
    get_batch_on_this_cp_rank,
    get_online_batch_on_this_cp_rank,
    pack_from_megatron,
    redistribute_rows,
    row_source_from_megatron,
)
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.data.packing import Pack, draw_blocks, feature_reader, read_pack
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.plan.redistribution import Redistribution
from tests.drafter.harness import on_ranks, parallel_state
from tests.plan.test_row_source import te_partitioned_indices
from tests.train.launches import make_store

DOCUMENTS = np.array([3, 0, 5, 9, 8])  # of 63, 70, 30, 1 and 2 tokens
PAD = 0


def _megatron_item(pack: Pack, granularity: int, extra_bounds: int) -> dict[str, Any]:
    """The pack as a sample of Megatron's: padded documents, shifted labels and loss mask."""
    lengths = np.diff(pack.cu_seqlens)
    padded = -(-lengths // granularity) * granularity
    tokens, mask = [], []
    for start, length, room in zip(pack.cu_seqlens, lengths, padded, strict=False):
        fill = np.zeros(room - length, dtype=np.int64)
        tokens.append(np.append(pack.token_ids[start : start + length], fill + PAD))
        mask.append(np.append(pack.loss_mask[start : start + length], fill > 0))
    tokens, mask = np.concatenate(tokens), np.concatenate(mask)
    bounds, real = (np.append(0, np.cumsum(n)) for n in (padded, lengths))

    def filled(cu_seqlens: np.ndarray) -> torch.Tensor:
        full = np.pad(cu_seqlens, (0, extra_bounds), mode="edge").astype(np.int32)
        return torch.from_numpy(full)[None]

    return {
        "tokens": torch.from_numpy(tokens)[None],
        "labels": torch.from_numpy(np.append(tokens[1:], PAD))[None],
        "loss_mask": torch.from_numpy(np.append(mask[1:], False)).float()[None],
        "position_ids": torch.arange(tokens.size)[None],
        "cu_seqlens": filled(real),
        "cu_seqlens_padded": filled(bounds),
        "max_seqlen": torch.tensor([padded.max()], dtype=torch.int32),
        "attention_mask": None,
    }


def _features(store: FeatureStore, pack: Pack, item: dict[str, Any]) -> torch.Tensor:
    """What a target would give for every row of Megatron's sequence; rubbish at padding."""
    end = int(pack.cu_seqlens[-1])
    real = feature_reader(store, pack)(np.array([[0, end]]))
    bounds, lengths = item["cu_seqlens_padded"][0].numpy(), np.diff(pack.cu_seqlens)
    rows = np.concatenate([start + np.arange(n) for start, n in zip(bounds, lengths, strict=False)])
    everything = torch.full((int(bounds[-1]), real.shape[1]), torch.nan)
    everything[rows] = real
    return everything


def _online_equals_offline(folder: Path, tp: int, cp: int, strategy: str) -> list[float]:
    from megatron.core import parallel_state as state
    from megatron.core import utils

    class Extension:
        thd_get_partitioned_indices = staticmethod(te_partitioned_indices)

    store = FeatureStore(folder)
    with parallel_state(tp, cp), pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "tex", Extension, raising=False)
        cp_group, cp_rank = state.get_context_parallel_group(), state.get_context_parallel_rank()

        # The offline way: every rank reads its own rows.
        expected_pack = read_pack(store, DOCUMENTS)
        layout = draw_blocks(expected_pack, num_anchors=6, block_size=4, seed=5, item_index=7)
        length = int(expected_pack.cu_seqlens[-1])
        plan = build_plan(layout, length, cp, strategy=strategy, chunks_per_rank=2)
        reader = feature_reader(store, expected_pack)
        expected = get_batch_on_this_cp_rank(expected_pack, plan, cp_rank, reader, mask_token_id=63)

        # Megatron's: only the first rank of a tensor-parallel group has the sample.
        item = _megatron_item(expected_pack, 2 * cp, extra_bounds=3)
        tp_rank = state.get_tensor_model_parallel_rank()
        batch = utils.get_batch_on_this_tp_rank(
            dict(item) if tp_rank == 0 else {},
            has_cu_seqlens=True,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            broadcast_src_rank=state.get_tensor_model_parallel_src_rank(),
            broadcast_group=state.get_tensor_model_parallel_group(),
            cp_size=cp,
            tp_rank=tp_rank,
            micro_batch_size=1,
            seq_length=item["tokens"].shape[1],
            mtp_on_this_rank=False,
        )
        pack = pack_from_megatron(batch, DOCUMENTS)
        for name in ("document_ids", "cu_seqlens", "token_ids", "loss_mask"):
            assert np.array_equal(getattr(pack, name), getattr(expected_pack, name)), name
        source = row_source_from_megatron(batch, cp)
        split = utils.get_batch_on_this_cp_rank(dict(batch), is_hybrid_cp=False, cp_group=cp_group)
        here = split["position_ids"][0]  # rows of the padded sequence that this rank has
        hidden = _features(store, expected_pack, item)[here][:, None].requires_grad_()

        layout = draw_blocks(pack, num_anchors=6, block_size=4, seed=5, item_index=7)
        online = build_plan(layout, source.context_length, cp, strategy=strategy, chunks_per_rank=2)
        assert online.digest == plan.digest
        with CommMeter() as meter:
            actual = get_online_batch_on_this_cp_rank(
                pack, online, source, hidden, cp_group, mask_token_id=63
            )
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name
        sent = Redistribution.of(online, source, cp_rank).sent_index.size
        assert meter.bytes() == sent * hidden[0].numel() * 4
        assert meter.calls() == 1

        # Gradients: of a row's feature what its owner makes of it, of padding nothing.
        actual["context_features"].mul(online_weights(online, cp_rank)).sum().backward()
        rows = torch.from_numpy(source.rows(cp_rank))
        assert torch.equal(hidden.grad[:, 0, 0], torch.where(rows < 0, 0, rows + 1).float())

        # Tokens in Megatron's layout travel too.
        tokens = redistribute_rows(split["tokens"][0], online, source, cp_group, label="tokens")
        assert torch.equal(tokens, torch.from_numpy(pack.token_ids[online.rows(cp_rank)]))
        return meter.bytes()


def online_weights(plan: ContextPlan, rank: int) -> torch.Tensor:
    return torch.from_numpy(plan.rows(rank) + 1).float()[:, None]


@pytest.mark.parametrize("strategy", ["balanced", "none"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_the_batch_of_an_online_target_is_that_of_the_store(
    tmp_path: Path, tp: int, cp: int, strategy: str
) -> None:
    make_store(tmp_path / "store")
    sent = on_ranks(4, _online_equals_offline, tmp_path / "store", tp, cp, strategy)
    assert sum(sent) > 0


def test_one_process_has_nothing_to_send(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    store = make_store(tmp_path / "store")
    expected_pack = read_pack(store, DOCUMENTS)
    item = _megatron_item(expected_pack, 1, extra_bounds=1)
    pack, source = pack_from_megatron(item, DOCUMENTS), row_source_from_megatron(item, 1)
    layout = draw_blocks(pack, num_anchors=6, block_size=4, seed=5, item_index=7)
    plan = build_plan(layout, source.context_length, 1, strategy="none")
    reader = feature_reader(store, expected_pack)
    expected = get_batch_on_this_cp_rank(expected_pack, plan, 0, reader, mask_token_id=63)
    hidden = _features(store, expected_pack, item)
    with CommMeter() as meter:
        actual = get_online_batch_on_this_cp_rank(
            pack, plan, source, hidden, None, mask_token_id=63
        )
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert meter.calls() == 0
