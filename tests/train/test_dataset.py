"""Items follow from their index alone: on every rank, at every evaluation, after a resume."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_splitkv.data.dealing import Dealing
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.testing.synthetic import make_synthetic_store
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset, split_batch
from tests.train.launches import make_store

RECIPE = BlockRecipe(
    num_anchors=6,
    block_size=4,
    mask_token_id=63,
    plan_strategy="balanced",
    chunks_per_rank=3,
    seed=5,
)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return make_store(tmp_path / "store")


def _dataset(
    store: FeatureStore,
    rank: int = 0,
    size: int = 1,
    period: int | None = None,
    recipe: BlockRecipe = RECIPE,
    dealing: Dealing | None = None,
) -> PackDataset:
    packing = PackedEpochs(store.lengths, 96, seed=5)
    return PackDataset(
        store,
        packing,
        recipe,
        num_items=40,
        cp_rank=rank,
        cp_size=size,
        dealing=dealing,
        period=period,
    )


def _plan(item: dict[str, torch.Tensor]) -> ContextPlan:
    collated = {name: tensor[None] for name, tensor in item.items()}
    return ContextPlan.from_arrays(split_batch(collated)[1])


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a5_ranks_agree_on_anchors_whatever_used_the_random_generators(
    store: FeatureStore,
) -> None:
    digests = []
    for rank in range(4):
        torch.rand(rank + 1)
        np.random.default_rng().random(rank + 1)
        digests.append([_plan(_dataset(store, rank, 4)[step]).digest for step in range(5)])
    assert digests[1:] == digests[:-1]
    assert len(set(digests[0])) == 5  # and every item, so every data-parallel replica, has its own


def test_a_document_gets_new_anchors_each_time_it_comes(store: FeatureStore) -> None:
    dataset = _dataset(store)

    def anchors(item: int, document: int) -> list[int]:
        slot = dataset.packing.pack_documents(item).tolist().index(document)
        layout = _plan(dataset[item]).layout
        of_document = slice(slot * RECIPE.num_anchors, (slot + 1) * RECIPE.num_anchors)
        return (layout.anchor_positions - layout.document_starts)[of_document].tolist()

    items = [i for i in range(20) if 0 in dataset.packing.pack_documents(i)][:3]
    draws = [anchors(item, document=0) for item in items]
    assert draws[0] != draws[1] != draws[2]


def test_anchors_do_not_depend_on_the_context_parallel_size(store: FeatureStore) -> None:
    def kept(size: int) -> list[np.ndarray]:
        layouts = [_plan(_dataset(store, 0, size)[item]).layout for item in range(6)]
        return [x.anchor_positions[x.block_keep_mask] for x in layouts]

    for size in (2, 3, 4):
        assert all(map(np.array_equal, kept(1), kept(size)))


def test_ranks_share_the_rows_and_read_no_others(store: FeatureStore) -> None:
    before = store.bytes_read
    whole = _dataset(store)[3]
    bytes_of_pack = store.bytes_read - before
    read, rows = [], []
    for rank in range(3):
        before = store.bytes_read
        item = _dataset(store, rank, 3)[3]
        read.append(store.bytes_read - before)
        plan = _plan(item)
        assert torch.equal(item["context_features"], whole["context_features"][plan.rows(rank)])
        rows.append(plan.rows(rank))
    assert sum(read) == bytes_of_pack
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(_plan(whole).context_length))


def test_evaluations_see_the_same_packs_and_anchors(store: FeatureStore) -> None:
    dataset = _dataset(store, period=4)
    for item in range(4):
        assert _same(dataset[item], dataset[item + 4])
        assert _same(dataset[item], dataset[item + 8])
    assert not _same(dataset[0], dataset[1])
    training = _dataset(store)
    assert not _same(training[0], training[training.packing.num_packs(0)])  # a new epoch


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_step_sees_the_same_packs_and_anchors_whatever_the_replicas(
    store: FeatureStore, replicas: int
) -> None:
    """Loaders as Megatron builds them, one a replica; step 0 and 1 of 4 packs, then a resume."""
    plain = _dataset(store)
    for start, steps in ((0, 2), (8, 1)):
        dealing = Dealing(
            plain.packing,
            store.lengths**2,
            start=start,
            global_batch_size=4,
            num_replicas=replicas,
        )
        dealt = _dataset(store, dealing=dealing)
        for first in range(start, start + 4 * steps, 4):
            hands = [
                [_plan(dealt[i]).digest for i in range(first + r, first + 4, replicas)]
                for r in range(replicas)
            ]
            expected = [_plan(plain[i]).digest for i in range(first, first + 4)]
            assert sorted(chain(*hands)) == sorted(expected)
            assert len(set(expected)) == 4


def test_dealt_evaluations_see_the_same_packs_and_anchors(store: FeatureStore) -> None:
    packing = PackedEpochs(store.lengths, 96, seed=5)
    dealing = Dealing(
        packing, store.lengths**2, start=0, global_batch_size=4, num_replicas=2, period=4
    )
    dataset, plain = _dataset(store, period=4, dealing=dealing), _dataset(store)
    assert all(_same(dataset[i], dataset[i + 4]) for i in range(4))
    digests = [_plan(plain[i]).digest for i in range(4)]
    assert sorted(_plan(dataset[i]).digest for i in range(4)) == sorted(digests)


def test_a_resumed_loader_goes_on_where_the_first_one_stood(store: FeatureStore) -> None:
    dataset = _dataset(store, 1, 2)
    whole = list(DataLoader(dataset, batch_sampler=[[i] for i in range(8)]))
    resumed = list(DataLoader(dataset, batch_sampler=[[i] for i in range(5, 8)], num_workers=2))
    assert all(map(_same, whole[5:], resumed))


def test_collation_and_back_keeps_the_plan_bitwise(store: FeatureStore) -> None:
    dataset = _dataset(store, 1, 2)
    (collated,) = DataLoader(dataset, batch_sampler=[[7]])
    batch, arrays = split_batch(collated)
    item = dataset[7]
    assert _plan(item).digest == ContextPlan.from_arrays(arrays).digest
    assert all(torch.equal(batch[name], item[name]) for name in batch)
    assert set(batch) == {
        "context_features",
        "context_positions",
        "block_tokens",
        "block_positions",
        "block_real_tokens",
        "block_labels",
        "block_label_mask",
        "block_keep_mask",
    }


def test_a_pack_too_short_for_the_wished_chunks_takes_fewer(store: FeatureStore) -> None:
    dataset = _dataset(store, size=4, recipe=replace(RECIPE, chunks_per_rank=10**6))
    for item in range(4):
        plan = _plan(dataset[item])
        assert np.bincount(plan.chunk_owner).tolist() == [plan.context_length // 4] * 4


def test_short_documents_do_not_fill_a_pack_with_padding(store: FeatureStore) -> None:
    """Only the blocks that round the count up to a multiple of P are padding."""
    few, many = (
        _dataset(store, size=3, recipe=replace(RECIPE, num_anchors=n)) for n in (999, 10**9)
    )
    for item in range(4):
        keep = few[item]["plan.block_keep_mask"]
        assert (~keep).sum() < 3
        assert torch.equal(many[item]["plan.anchor_positions"], few[item]["plan.anchor_positions"])


def test_items_carry_the_teacher_where_a_drafter_wants_it(tmp_path: Path) -> None:
    """Rows of the store one position before each label, and none of them for the others."""
    store = make_synthetic_store(tmp_path / "s", [40, 30, 20], final_hidden=True)
    taught = _dataset(store, recipe=replace(RECIPE, label_shift=1, final_hidden=True))[0]
    plain = _dataset(store, recipe=replace(RECIPE, label_shift=1))[0]
    teacher = taught.pop("block_teacher_hidden")
    assert _same(taught, plain)
    documents, plan = PackedEpochs(store.lengths, 96, seed=5).pack_documents(0), _plan(plain)
    rows = torch.cat([store.read_final_hidden(int(i), 0, int(store.lengths[i])) for i in documents])
    slots = torch.from_numpy(plan.layout.anchor_positions)[:, None] + torch.arange(4)
    trained = plain["block_label_mask"].view(-1, 4)
    expected = torch.where(trained[..., None], rows[torch.where(trained, slots, 0)], 0)
    assert torch.equal(teacher, expected.flatten(0, 1))
    assert trained.any()
