"""What Megatron's `pretrain` asks a training script for: datasets and a model."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_splitkv.attention.choice import block_order_of
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.kinds import model_class
from megatron_splitkv.drafter.model import DFlashModel
from megatron_splitkv.drafter.specs import get_dflash_layer_spec
from megatron_splitkv.train.arguments import splitkv_options
from megatron_splitkv.train.dataset import BlockRecipe, PackDataset
from megatron_splitkv.train.initial_drafter import load_initial_weights
from megatron_splitkv.train.packing_arguments import (
    deal_evaluation,
    deal_training,
    packed_epochs,
)
from megatron_splitkv.train.setup import TrainingSetup
from megatron_splitkv.train.strategy_choice import plan_cost_of

# Megatron's sampler must never come to the end of the evaluation packs, which repeat.
_EVALUATIONS = 1 << 20


class DatasetsProvider:
    """Builds training and validation packs of this rank: Megatron's datasets provider.

    Args:
        setup: the checked launch.
    """

    # Every rank builds its own loader: context-parallel ranks read different rows of one pack.
    is_distributed = True

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def __call__(
        self, num_samples: tuple[int, int, int]
    ) -> tuple[PackDataset, PackDataset | None, None]:
        """Return (train, valid, None).

        Args:
            num_samples: packs that Megatron will take of each split.
        """
        train = self._dataset(self.setup.store, num_items=num_samples[0])
        period = self.setup.args.eval_iters * self.setup.args.eval_global_batch_size
        if self.setup.valid_store is None or period == 0:
            return train, None, None
        valid = self._dataset(
            self.setup.valid_store, num_items=period * _EVALUATIONS, period=period
        )
        return train, valid, None

    def _dataset(
        self, store: FeatureStore, *, num_items: int, period: int | None = None
    ) -> PackDataset:
        args, dflash = self.setup.args, self.setup.dflash
        recipe = BlockRecipe(
            num_anchors=args.num_anchors,
            block_size=dflash.block_size,
            mask_token_id=dflash.mask_token_id,
            plan_strategy=args.plan_strategy,
            chunks_per_rank=args.chunks_per_rank,
            seed=args.seed,
            plan_cost=plan_cost_of(args),
            label_shift=dflash.label_shift,
            windows=dflash.windows,
            block_order=block_order_of(args.cp_comm_type),
            final_hidden=dflash.needs_final_hidden,
        )
        packing = packed_epochs(args, store.lengths)
        if period is None:
            dealing = deal_training(args, dflash, packing)
        else:
            dealing = deal_evaluation(args, dflash, packing, period)
        return PackDataset(
            store,
            packing,
            recipe,
            num_items=num_items,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            dealing=dealing,
            period=period,
            online=self.setup.open_target is not None,
        )


class ModelProvider:
    """Builds the drafter with its target's frozen embedding and head: Megatron's model provider.

    Args:
        setup: the checked launch.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def __call__(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> DFlashModel:
        """Build the model of this rank.

        Args:
            pre_process: always True, there are no pipeline stages.
            post_process: likewise.
            vp_stage: always None.
            config: a model configuration if Megatron has one; the setup's is used.
            pg_collection: process groups.
        """
        args = self.setup.args
        embedding, head = self.setup.store.frozen()
        model = model_class(args.drafter)(
            self.setup.config,
            self.setup.dflash,
            layer_spec=get_dflash_layer_spec(
                args.transformer_impl,
                attention_kernel=args.attention_kernel,
                splitkv=splitkv_options(args),
            ),
            embedding_weight=embedding,
            head_weight=None if head is embedding else head,
            pg_collection=pg_collection,
            init_seed=args.seed,
        )
        if self.setup.initial_weights:
            load_initial_weights(model, self.setup.initial_weights, tp_group=model.tp_group)
        return model
