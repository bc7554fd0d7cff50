"""Feature stores as a Megatron-Bridge dataset."""

from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

from megatron_splitkv.config import PLAN_STRATEGIES, ConfigError, require_choice
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset
from megatron_splitkv.train.setup import open_store
from megatron_splitkv.train.validate import check_same_target

# Bridge's sampler must never come to the end of the evaluation packs, which repeat.
_EVALUATIONS = 1 << 20


@dataclass(frozen=True)
class _Drawing:
    """What the container adds to the fields of the provider."""

    recipe: BlockRecipe
    seq_length: int
    eval_packs: int


@dataclass(kw_only=True)
class FeatureStoreProvider(DatasetProvider):
    """Packs of feature stores that `splitkv prepare` wrote, with freshly drawn draft blocks.

    Args:
        feature_store: folder of the documents to train on.
        valid_feature_store: folder of held-out documents; without one there is no evaluation.
        verify_feature_store: ``size``, ``full``, or ``auto``: full up to 1 GiB.
        target_id: refuse a store of any other target.
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
    num_anchors: int = 512
    max_anchors_per_pack: int | None = None
    plan_strategy: str = "balanced"
    chunks_per_rank: int | None = None
    seed: int = 1234
    _stores: tuple[FeatureStore, FeatureStore | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _drawing: _Drawing | None = field(default=None, init=False, repr=False, compare=False)

    def open(self) -> tuple[FeatureStore, FeatureStore | None]:
        """Open the stores, once, and check that they are of one target.

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
        store = open_store(self.feature_store, self.verify_feature_store)
        store.require_features()
        if self.target_id is not None and self.target_id != store.meta.target.id:
            raise ConfigError(
                f"{self.feature_store} holds features of target {store.meta.target.id!r}, "
                f"dataset.target_id is {self.target_id!r}; use a store of that target"
            )
        valid_store = None
        if self.valid_feature_store is not None:
            valid_store = open_store(self.valid_feature_store, self.verify_feature_store)
            valid_store.require_features()
            check_same_target(
                self.feature_store, store.meta, self.valid_feature_store, valid_store.meta
            )
        self._stores = (store, valid_store)
        return self._stores

    def pack(self, store: FeatureStore, seq_length: int) -> PackedEpochs:
        """The order of a store's packs.

        Packs are not dealt to replicas by their cost: Bridge does not tell a provider how many
        samples were consumed.

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
        eval_packs: int,
        block_order: str = "contiguous",
    ) -> None:
        """Say for which drafter blocks are drawn.

        Args:
            dflash: the drafter.
            seq_length: tokens of a pack.
            eval_packs: packs of one evaluation, which are the same every time.
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
        self._drawing = _Drawing(recipe, seq_length, eval_packs)

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[PackDataset, PackDataset | None, None]:
        """Return this rank's (train, valid, None): Bridge's hook.

        Args:
            context: packs that Bridge will take of each split, and the process groups.

        Raises:
            ConfigError: nobody said which drafter the packs are for.
        """
        if self._drawing is None:
            raise ConfigError(
                "the packs have no drafter; validate their DFlashConfigContainer first, or call "
                "draw_for(...) on the dataset"
            )
        store, valid_store = self.open()
        cp_group = context.pg_collection.cp
        train = self._dataset(store, cp_group, num_items=context.train_samples)
        period = self._drawing.eval_packs
        if valid_store is None or period == 0:
            return train, None, None
        valid = self._dataset(valid_store, cp_group, num_items=period * _EVALUATIONS, period=period)
        return train, valid, None

    def _dataset(
        self, store: FeatureStore, cp_group: Any, *, num_items: int, period: int | None = None
    ) -> PackDataset:
        assert self._drawing is not None
        return PackDataset(
            store,
            self.pack(store, self._drawing.seq_length),
            self._drawing.recipe,
            num_items=num_items,
            cp_rank=cp_group.rank(),
            cp_size=cp_group.size(),
            period=period,
        )
