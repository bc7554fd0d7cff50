"""A drafter's whole Megatron-Bridge configuration, with the checks that join its parts.

Bridge calls `validate` on every rank before the first collective: what a user has to mend is
refused there, whatever script called Bridge's ``pretrain()``.
"""

from dataclasses import dataclass

import numpy as np
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_local_rank_preinit, get_rank_safe
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from megatron_splitkv.attention.choice import block_order_of
from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.loss import check_token_count
from megatron_splitkv.recipes.data import ONLINE_TARGET, FeatureStoreProvider
from megatron_splitkv.recipes.model import DFlashModelConfig
from megatron_splitkv.train.drafter_file import check_checkpoint_folder, write_drafter_config
from megatron_splitkv.train.online_arguments import OpenTarget, open_target
from megatron_splitkv.train.setup import check_writable
from megatron_splitkv.train.validate import check_same_target, check_teacher

# A saved configuration names our classes, and Bridge builds only what is allowed.
register_allowed_target_prefix("megatron_splitkv.")


@dataclass(kw_only=True)
class DFlashConfigContainer(ConfigContainer):
    """Bridge's `ConfigContainer` of a drafter.

    Args:
        model: the drafter.
        dataset: its feature stores.
        validation: Bridge's; ``eval_iters`` None is one pass over the held-out packs.
    """

    model: DFlashModelConfig
    dataset: FeatureStoreProvider

    def validate(self) -> None:
        """Open stores and target, check the parts against one another, and let Bridge check.

        Rank 0 leaves ``drafter_config.json`` in ``checkpoint.save``, where `splitkv export` looks
        for it.

        Raises:
            ConfigError: anything that the user has to mend.
        """
        require_choice("checkpoint.ckpt_format", self.checkpoint.ckpt_format, ("torch_dist",))
        for name, value in (
            ("train.micro_batch_size", self.train.micro_batch_size),
            ("validation.eval_micro_batch_size", self.validation.eval_micro_batch_size),
        ):
            if value not in (None, 1):
                raise ConfigError(
                    f"{name} {value} is not supported: a micro-batch is one pack of documents; use "
                    "1 and raise model.seq_length or train.global_batch_size"
                )
        if self.dist.eval_context_parallel_size not in (None, self.model.context_parallel_size):
            raise ConfigError(
                f"dist.eval_context_parallel_size {self.dist.eval_context_parallel_size} is not "
                "supported: held-out packs are split as those of training; drop it, or change "
                "model.context_parallel_size"
            )
        store, valid_store = self.dataset.open()
        # No checkpoint holds them, so nothing else notices when they are not what was trained with.
        store.check_frozen()
        self._check_against(store)
        stores = [store] if valid_store is None else [store, valid_store]
        metas = [
            self.dataset.features_meta(
                documents, self.model.dflash.target_layer_ids, bf16=self.model.bf16
            )
            for documents in stores
        ]
        for documents, meta in zip(stores, metas, strict=True):
            check_same_target(str(store.path), metas[0], str(documents.path), meta)
            # Packing refuses documents that are longer than a pack.
            self.dataset.pack(documents, self.model.seq_length)
            check_teacher(self.model.dflash, str(documents.path), meta)
        self._complete_evaluation(valid_store)
        self._check_by_bridge()

        dflash, target = self.model.dflash, store.meta.target
        for name in ("load", "save"):
            folder = getattr(self.checkpoint, name)
            if folder is not None:
                check_checkpoint_folder(f"checkpoint.{name}", folder, dflash, target)
        self.dataset.use_target(self._open_target(metas[0], stores))
        if self.checkpoint.save is not None:
            check_writable("checkpoint.save", self.checkpoint.save)
            if get_rank_safe() == 0:
                write_drafter_config(self.checkpoint.save, dflash, target)
        self.model.use(store, self.rng.seed)
        layers = self.model.cp_comm_type or "splitkv"
        self.dataset.draw_for(
            dflash,
            self.model.seq_length,
            batch=None if self.train.rampup_batch_size else self.train.global_batch_size,
            eval_batch=self.validation.eval_global_batch_size,
            eval_iters=self.validation.eval_iters,
            block_order=block_order_of([layers] if isinstance(layers, str) else layers),
        )

    def _open_target(self, meta: StoreMeta, stores: list[FeatureStore]) -> OpenTarget | None:
        """The target in the job for the documents of the stores, if one was asked for."""
        dataset, model = self.dataset, self.model
        if dataset.online_target is None or dataset.online_target_backend is None:
            return None
        return open_target(
            dataset.online_target,
            dataset.online_target_backend,
            meta,
            stores,
            final_hidden=model.dflash.needs_final_hidden,
            tp_size=model.tensor_model_parallel_size,
            cp_size=model.context_parallel_size,
            transformer_impl=model.transformer_impl,
            # As Bridge sets it, but before it does.
            gpu=0 if self.dist.external_gpu_device_mapping else get_local_rank_preinit(),
            option=ONLINE_TARGET,
        )

    def _check_against(self, store: FeatureStore) -> None:
        """Refuse a drafter that is not for the store's target."""
        target, dflash = store.meta.target, self.model.dflash
        online = self.dataset.online_target is not None
        taps = dflash.target_layer_ids if online else store.meta.target_layer_ids
        for name, value, wanted in (
            ("hidden_size", dflash.hidden_size, target.hidden_size),
            ("vocab_size", dflash.vocab_size, target.vocab_size),
            ("num_target_layers", dflash.num_target_layers, target.num_layers),
            ("target_layer_ids", dflash.target_layer_ids, taps),
        ):
            if value != wanted:
                raise ConfigError(
                    f"model.{name} is {value}, {self.dataset.feature_store} (target "
                    f"{target.id!r}) has {wanted}; choose the recipe of that target, or change it"
                )
        blocks_per_token = float(
            (np.minimum(self.dataset.num_anchors, store.lengths) / store.lengths).max()
        )
        check_token_count(
            int(blocks_per_token * self.model.seq_length),
            dflash.block_size,
            dflash.loss_decay_gamma,
            self.train.global_batch_size,
            dflash.first_trained_slot,
            dflash.loss_weights,
        )

    def _complete_evaluation(self, valid_store: FeatureStore | None) -> None:
        validation = self.validation
        if validation.eval_global_batch_size is None:
            validation.eval_global_batch_size = self.train.global_batch_size
        if valid_store is None:
            validation.eval_iters = 0
        elif validation.eval_iters is None:
            packs = self.dataset.pack(valid_store, self.model.seq_length).num_packs(0)
            validation.eval_iters = -(-packs // validation.eval_global_batch_size)

    def get_data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model among the ranks; Bridge asks before all else.

        Args:
            world_size: ranks of the job.

        Raises:
            ConfigError: the ranks cannot be split so.
        """
        ranks = self.model.tensor_model_parallel_size * self.model.context_parallel_size
        if world_size % ranks:
            raise ConfigError(
                f"{world_size} ranks cannot be split into groups of {ranks} "
                "(model.tensor_model_parallel_size x model.context_parallel_size); start a "
                f"multiple of {ranks}"
            )
        return world_size // ranks

    def _check_by_bridge(self) -> None:
        try:
            super().validate()
        except ConfigError:
            raise
        except (AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"Megatron-Bridge refuses the configuration: {reason}") from error
