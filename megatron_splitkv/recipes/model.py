"""The drafter as a Megatron-Bridge model: its configuration and what builds it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from megatron.bridge.models.common import (
    ModelBuilder,
    ModelConfig,
    compose_hooks,
    unimodal_build_distributed_models,
)
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from megatron_splitkv import compat
from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.config import KERNELS, ConfigError, require_choice
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter import (
    DFlashConfig,
    DFlashModel,
    check_transformer_config,
    get_dflash_layer_spec,
)

# What Megatron's configuration knows of a drafter: its name there, its name in `DFlashConfig`.
_IN_TRANSFORMER = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
}
# What else is one of `DFlashModelConfig`'s own fields, under the same name.
_OF_THE_MODEL = tuple(
    f.name for f in fields(DFlashConfig) if f.name not in _IN_TRANSFORMER.values()
)
# What all drafters share.
_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    # The same weights at every tensor and context parallel size; a drafter is small enough.
    "use_cpu_initialization": True,
}


@dataclass(kw_only=True)
class DFlashModelConfig(ModelConfig):
    """A DFlash drafter for Megatron-Bridge.

    Sizes that Megatron knows are fields of `transformer`, where users of Bridge expect them; what
    it does not know is here. Attributes of `transformer` are also read and set through this object,
    as Bridge does: ``model.context_parallel_size``.

    Args:
        transformer: Megatron's configuration; checked and completed by `finalize`.
        vocab_size: V, rows of the target's embedding.
        seq_length: tokens of a pack, of all its documents together.
        num_target_layers: layers of the target.
        target_layer_ids: 0-based target layers whose outputs are the context, ascending.
        mask_token_id: see `DFlashConfig`, as the fields down to `distillation_weight`.
        attention_kernel: local attention kernel.
        splitkv_gather: see `SplitKVOptions`, as the fields after it.
    """

    builder: ClassVar[str] = "megatron_splitkv.recipes.model.DFlashModelBuilder"

    transformer: TransformerConfig
    vocab_size: int
    seq_length: int
    num_target_layers: int
    target_layer_ids: list[int]
    mask_token_id: int
    block_size: int = 16
    rope_theta: float = 1e6
    loss_decay_gamma: float = 7.0
    max_position_embeddings: int = 40960
    bos_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    pad_token_id: int | None = None
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int | None = None
    input_embedding_scale: float = 1.0
    final_logit_softcapping: float | None = None
    loss_weights: str = "decay"
    distillation_weight: float = 0.0
    attention_kernel: str = "auto"
    splitkv_gather: str = "auto"
    splitkv_scatter: str = "auto"
    splitkv_query_cast: str = "auto"
    splitkv_save: str = "gathered"
    splitkv_fp32_reduce: bool = False
    splitkv_ranks_per_node: int | None = None
    # Where the frozen embedding and head come from, and the seed of the first weights: the
    # container's, which hands them over. Not part of what a saved configuration says.
    _store: FeatureStore | None = field(default=None, init=False, repr=False, compare=False)
    _init_seed: int = field(default=1234, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, dflash: DFlashConfig, *, seq_length: int, **transformer: Any) -> Self:
        """Return the model of a drafter.

        Args:
            dflash: the drafter.
            seq_length: tokens of a pack.
            **transformer: further fields of Megatron's configuration, e.g. parallel sizes.
        """
        sizes = {ours: getattr(dflash, theirs) for ours, theirs in _IN_TRANSFORMER.items()}
        own: dict[str, Any] = {name: getattr(dflash, name) for name in _OF_THE_MODEL}
        for name in ("target_layer_ids", "eos_token_ids", "layer_types"):
            own[name] = list(own[name])  # YAML knows no tuples
        if dflash.sliding_window is None:
            own["layer_types"] = []  # however many layers an override asks for
        return cls(
            transformer=TransformerConfig(**sizes, **_ALWAYS, **transformer),
            seq_length=seq_length,
            **own,
        )

    @property
    def dflash(self) -> DFlashConfig:
        """The drafter that the fields describe.

        Raises:
            ConfigError: one that cannot be.
        """
        transformer = self.transformer
        sizes = {theirs: getattr(transformer, ours) for ours, theirs in _IN_TRANSFORMER.items()}
        return DFlashConfig(**sizes, **{name: getattr(self, name) for name in _OF_THE_MODEL})

    @property
    def splitkv(self) -> SplitKVOptions:
        """What the fields say about split-KV's communication.

        Raises:
            ConfigError: an unknown name, or choices that exclude each other.
        """
        return SplitKVOptions(
            gather=self.splitkv_gather,
            scatter=self.splitkv_scatter,
            query_cast=self.splitkv_query_cast,
            save=self.splitkv_save,
            fp32_reduce=self.splitkv_fp32_reduce,
            ranks_per_node=self.splitkv_ranks_per_node,
        )

    def use(self, store: FeatureStore, init_seed: int) -> None:
        """Take the target's frozen embedding and head from a store when the model is built.

        Args:
            store: of the target.
            init_seed: seed of the drafter's first weights.
        """
        self._store, self._init_seed = store, init_seed

    def finalize(self) -> None:
        """Complete Megatron's configuration and refuse one that is no drafter's.

        Raises:
            ConfigError: naming the field, its value and the allowed one.
        """
        require_choice("attention_kernel", self.attention_kernel, KERNELS)
        # The only activation that a drafter has. A saved configuration holds no functions.
        self.transformer.activation_func = F.silu
        self.transformer.finalize()
        check_transformer_config(self.transformer, self.dflash)
        self.splitkv  # noqa: B018 (refuses unknown choices)

    def as_dict(self) -> dict[str, Any]:
        """What a saved configuration says, with the sizes that Bridge looks for when it resumes.

        Bridge 0.6.2 reads them at this level, where a model without nested parts has them.
        """
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        return super().as_dict() | {name: getattr(self, name) for name in sizes}

    # What Bridge would estimate as if for a GPT, and prints.

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """For Bridge's estimate of memory: no head of the drafter's own."""
        return True

    def _get_num_floating_point_operations(self, batch_size: int) -> int:
        """Bridge's hook for its throughput: none, rather than those of a GPT."""
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["transformer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        transformer = self.__dict__.get("transformer")
        if name in _OWN_FIELDS or transformer is None or not hasattr(transformer, name):
            super().__setattr__(name, value)
        else:
            setattr(transformer, name, value)


_OWN_FIELDS = frozenset(f.name for f in fields(DFlashModelConfig))


class DFlashModelBuilder(ModelBuilder[DFlashModel, DFlashModelConfig]):
    """Builds the drafter with its target's frozen embedding and head.

    Args:
        model_config: finalized, with a store.
    """

    _model_config: DFlashModelConfig

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> DFlashModel:
        """Build the model of this rank.

        Args:
            pg_collection: process groups.
            pre_process: unused, there are no pipeline stages.
            post_process: likewise.
            vp_stage: likewise.

        Raises:
            ConfigError: nobody said where the target's embedding is.
        """
        config = self._model_config
        if config._store is None:
            raise ConfigError(
                "the drafter has no embedding and head; validate its DFlashConfigContainer first, "
                "or call use(store, seed) on its configuration"
            )
        embedding, head = config._store.frozen()
        compat.mend_distributed_optimizer()  # before Bridge builds one for this model
        return DFlashModel(
            config.transformer,
            config.dflash,
            layer_spec=get_dflash_layer_spec(
                config.transformer.transformer_impl,
                attention_kernel=config.attention_kernel,
                splitkv=config.splitkv,
            ),
            embedding_weight=embedding,
            head_weight=None if head is embedding else head,
            pg_collection=pg_collection,
            init_seed=config._init_seed,
        )

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None = None,
        overlap_param_gather_with_optimizer_step: bool = False,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = False,
        mixed_precision_wrapper: Callable[..., Any] | None = Float16Module,
        model_type: ModelType = ModelType.encoder_or_decoder,
    ) -> list[DFlashModel]:
        """Build the model and wrap it for training; all arguments are Bridge's.

        Returns:
            One wrapped model.

        Raises:
            ConfigError: FSDP is asked for.
        """
        if use_megatron_fsdp or use_torch_fsdp2:
            raise ConfigError(
                "FSDP is not supported: a drafter is small; set dist.use_megatron_fsdp and "
                "dist.use_torch_fsdp2 to false and keep ddp.use_distributed_optimizer"
            )
        config = self._model_config
        models = unimodal_build_distributed_models(
            self.build_model,
            config.transformer,
            pg_collection,
            ddp_config,
            overlap_param_gather_with_optimizer_step=overlap_param_gather_with_optimizer_step,
            wrap_with_ddp=wrap_with_ddp,
            data_parallel_random_init=data_parallel_random_init,
            mixed_precision_wrapper=mixed_precision_wrapper,
            pre_wrap_hook=compose_hooks(config.pre_wrap_hooks),
            model_type=model_type,
        )
        return compose_hooks(config.post_wrap_hooks)(models)
