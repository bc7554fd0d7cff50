"""Feature stores as a Megatron-Bridge dataset."""

from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError, require_choice
from megatron_splitkv.data.dealing import Dealing
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset
from megatron_splitkv.train.online_arguments import (
    OpenTarget,
    check_online_choice,
    meta_of_target,
)
from megatron_splitkv.train.packing_arguments import deal_packs
from megatron_splitkv.train.setup import open_store

ONLINE_TARGET = "dataset.online_target"

# Bridge's sampler must never come to the end of the evaluation packs, which repeat.
_EVALUATIONS = 1 << 20


@dataclass(frozen=True)
class _Drawing:
    """What the container adds to the fields of the provider."""

    dflash: DFlashConfig
    recipe: BlockRecipe
    seq_length: int
    batch: int | None
    eval_batch: int
    eval_iters: int


@dataclass(frozen=True)
class _Consumed:
    """Packs that Bridge's samplers skip: those of the run that it resumes."""

    train: int
    valid: int


@dataclass(kw_only=True)
class FeatureStoreProvider(DatasetProvider):
    """Packs of feature stores that `splitkv prepare` wrote, with freshly drawn draft blocks.

    Args:
        feature_store: folder of the documents to train on.
        valid_feature_store: folder of held-out documents; without one there is no evaluation.
        verify_feature_store: ``size``, ``full``, or ``auto``: full up to 1 GiB.
        target_id: refuse a store of any other target.
        online_target: local Hugging Face folder of the target, to run it in the job: the stores may
            hold tokens alone, and features that they have are not read. The drafter's own
            ``model.target_layer_ids`` are tapped.
        online_target_backend: what runs it, ``hf`` or ``megatron``; None is ``hf``.
        num_anchors: draft blocks per document and step.
        max_anchors_per_pack: anchor budget of a pack, see `PackedEpochs`.
        plan_strategy: how context rows are assigned to context-parallel ranks.
        chunks_per_rank: context chunks that each rank gets; None lets the planner choose.
        seed: of the order of the documents and of the anchors.
    """

    dataloader_type: str | None = "single"  # an item's index says everything about it
    feature_store: str | None = None
    valid_feature_store: str | None = None
    verify_feature_store: str = "auto"
    target_id: str | None = None
    online_target: str | None = None
    online_target_backend: str | None = None
    num_anchors: int = 512
    max_anchors_per_pack: int | None = None
    plan_strategy: str = "balanced"
    chunks_per_rank: int | None = None
    seed: int = 1234
    _stores: tuple[FeatureStore, FeatureStore | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _drawing: _Drawing | None = field(default=None, init=False, repr=False, compare=False)
    _consumed: _Consumed | None = field(default=None, init=False, repr=False, compare=False)
    _open_target: OpenTarget | None = field(default=None, init=False, repr=False, compare=False)

    def open(self) -> tuple[FeatureStore, FeatureStore | None]:
        """Open the stores, once.

        Returns:
            The documents to train on, and the held-out ones if there are any.

        Raises:
            ConfigError: a field, a folder or a file is wrong.
        """
        if self._stores is not None:
            return self._stores
        if self.feature_store is None:
            raise ConfigError(
                "dataset.feature_store is missing; name a folder that `splitkv prepare` wrote"
            )
        require_choice("dataset.dataloader_type", str(self.dataloader_type), ("single",))
        require_choice("dataset.plan_strategy", self.plan_strategy, PLAN_STRATEGIES)
        require_choice(
            "dataset.verify_feature_store", self.verify_feature_store, ("auto", "size", "full")
        )
        for name in ("num_anchors", "max_anchors_per_pack", "chunks_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"dataset.{name} {value} is too small; it must be at least 1")
        self.online_target_backend = check_online_choice(
            self.online_target,
            self.online_target_backend,
            ONLINE_TARGET,
            "dataset.online_target_backend",
        )
        store = open_store(self.feature_store, self.verify_feature_store)
        if self.target_id is not None and self.target_id != store.meta.target.id:
            raise ConfigError(
                f"{self.feature_store} holds features of target {store.meta.target.id!r}, "
                f"dataset.target_id is {self.target_id!r}; use a store of that target"
            )
        valid_store = None
        if self.valid_feature_store is not None:
            valid_store = open_store(self.valid_feature_store, self.verify_feature_store)
        if self.online_target is None:
            for documents in (store, valid_store):
                if documents is not None:
                    documents.require_features()
        self._stores = (store, valid_store)
        return self._stores

    def features_meta(
        self, store: FeatureStore, target_layer_ids: tuple[int, ...], *, bf16: bool
    ) -> StoreMeta:
        """What training gets as features of a store's documents: its own, or the target's.

        Args:
            store: of `open`.
            target_layer_ids: layers that the drafter reads.
            bf16: whether training is in bf16.

        Raises:
            ConfigError: a target in the job has no such layers.
        """
        if self.online_target is None:
            return store.meta
        return meta_of_target(store.meta, target_layer_ids, bf16=bf16)

    @property
    def open_target(self) -> OpenTarget | None:
        """What makes the target in the job once there are groups, if one was asked for."""
        return self._open_target

    def use_target(self, open_target: OpenTarget | None) -> None:
        """Take the target that computes the features in the job.

        Args:
            open_target: what makes it once there are groups.
        """
        self._open_target = open_target

    def continue_after(self, train_packs: int, valid_packs: int) -> None:
        """Say how many packs were consumed before: where the first global batch begins.

        Args:
            train_packs: of the documents to train on.
            valid_packs: of the held-out ones.
        """
        self._consumed = _Consumed(train_packs, valid_packs)

    def pack(self, store: FeatureStore, seq_length: int) -> PackedEpochs:
        """The order of a store's packs.

        Args:
            store: of `open`.
            seq_length: tokens of a pack.
        """
        return PackedEpochs(
            store.lengths,
            seq_length,
            self.seed,
            num_anchors=self.num_anchors,
            max_anchors=self.max_anchors_per_pack,
        )

    def draw_for(
        self,
        dflash: DFlashConfig,
        seq_length: int,
        *,
        batch: int | None,
        eval_batch: int,
        eval_iters: int,
        block_order: str = "contiguous",
    ) -> None:
        """Say for which drafter blocks are drawn, and how many packs a step takes.

        Args:
            dflash: the drafter.
            seq_length: tokens of a pack.
            batch: packs of a step over all replicas; None where it changes during the run.
            eval_batch: the same of an evaluation.
            eval_iters: steps of an evaluation, which sees the same packs every time.
            block_order: who owns which blocks, see `build_plan`.
        """
        recipe = BlockRecipe(
            num_anchors=self.num_anchors,
            block_size=dflash.block_size,
            mask_token_id=dflash.mask_token_id,
            plan_strategy=self.plan_strategy,
            chunks_per_rank=self.chunks_per_rank,
            seed=self.seed,
            label_shift=dflash.label_shift,
            windows=dflash.windows,
            block_order=block_order,
            final_hidden=dflash.needs_final_hidden,
        )
        self._drawing = _Drawing(dflash, recipe, seq_length, batch, eval_batch, eval_iters)

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[PackDataset, PackDataset | None, None]:
        """Return this rank's (train, valid, None): Bridge's hook.

        Args:
            context: packs that Bridge will take of each split, and the process groups.

        Raises:
            ConfigError: nobody said which drafter the packs are for, or, where several replicas
                share a batch, where the run goes on.
        """
        drawing = self._drawing
        if drawing is None:
            raise ConfigError(
                "the packs have no drafter; validate their DFlashConfigContainer first, or call "
                "draw_for(...) on the dataset"
            )
        store, valid_store = self.open()
        groups = context.pg_collection
        consumed = self._consumed
        if consumed is None:
            if groups.dp.size() > 1:
                raise ConfigError(
                    f"packs cannot be dealt to {groups.dp.size()} data-parallel replicas: nobody "
                    "said where the run goes on; call Bridge's pretrain(config, "
                    "BridgeForwardStep(), callbacks=[DealPacks()])"
                )
            consumed = _Consumed(0, 0)
        train = self._dataset(
            store,
            groups,
            num_items=context.train_samples,
            start=consumed.train,
            batch=drawing.batch,
        )
        period = drawing.eval_iters * drawing.eval_batch
        if valid_store is None or period == 0:
            return train, None, None
        valid = self._dataset(
            valid_store,
            groups,
            num_items=period * _EVALUATIONS,
            start=consumed.valid,
            batch=drawing.eval_batch,
            period=period,
        )
        return train, valid, None

    def _dataset(
        self,
        store: FeatureStore,
        groups: Any,
        *,
        num_items: int,
        start: int,
        batch: int | None,
        period: int | None = None,
    ) -> PackDataset:
        drawing = self._drawing
        assert drawing is not None
        packing = self.pack(store, drawing.seq_length)
        dealing: Dealing | None = None
        if batch is not None:
            dealing = deal_packs(
                packing,
                drawing.dflash,
                self.num_anchors,
                start=start,
                global_batch_size=batch,
                num_replicas=groups.dp.size(),
                period=period,
            )
        return PackDataset(
            store,
            packing,
            drawing.recipe,
            num_items=num_items,
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            dealing=dealing,
            period=period,
            online=self.online_target is not None,
        )
