"""Recipes of published DFlash drafters, under the names by which NeMo users look for them.

Each is a function that needs no argument and returns a configuration for Bridge's ``pretrain()``:

    pretrain(config, BridgeForwardStep(), callbacks=[DealPacks()])

Only ``dataset.feature_store`` has to be filled in. Every field can be changed afterwards. The
arguments of `OnlineOptions` let the target run in the job.
"""

from typing import Any, TypedDict, Unpack

from megatron.bridge.training.config import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.recipes.container import DFlashConfigContainer
from megatron_splitkv.recipes.data import FeatureStoreProvider
from megatron_splitkv.recipes.model import DFlashModelConfig

_WEIGHT_DECAY = 0.01


class OnlineOptions(TypedDict, total=False):
    """A target that runs in the job, as the options of the same names of Megatron's launch say it.

    Args:
        online_target: its local Hugging Face folder; without one, features come from the store.
        online_target_backend: what runs it, ``hf`` (default) or ``megatron``.
    """

    online_target: str | None
    online_target_backend: str | None


def qwen3_8b_dflash_splitkv_pretrain_config(
    **online: Unpack[OnlineOptions],
) -> DFlashConfigContainer:
    """Drafter of Qwen3-8B: packs of 8,192 tokens on one node of 8 GPUs."""
    return dflash_splitkv_pretrain_config(
        DFlashConfig.preset("qwen3-8b"), seq_length=8192, context_parallel_size=8, **online
    )


def qwen35_35b_a3b_dflash_splitkv_pretrain_config(
    **online: Unpack[OnlineOptions],
) -> DFlashConfigContainer:
    """Drafter of Qwen3.5-35B-A3B: packs of 262,144 tokens on one node of 8 GPUs."""
    return dflash_splitkv_pretrain_config(
        DFlashConfig.preset("qwen3.5-35b-a3b"), seq_length=262144, context_parallel_size=8, **online
    )


def qwen35_27b_dflash_splitkv_pretrain_config(
    **online: Unpack[OnlineOptions],
) -> DFlashConfigContainer:
    """Drafter of Qwen3.5-27B: packs of 262,144 tokens on one node of 8 GPUs."""
    return dflash_splitkv_pretrain_config(
        DFlashConfig.preset("qwen3.5-27b"), seq_length=262144, context_parallel_size=8, **online
    )


def qwen36_27b_dflash_splitkv_pretrain_config(
    **online: Unpack[OnlineOptions],
) -> DFlashConfigContainer:
    """Drafter of Qwen3.6-27B, with sliding layers: packs of 262,144 tokens on 8 GPUs of a node."""
    return dflash_splitkv_pretrain_config(
        DFlashConfig.preset("qwen3.6-27b"), seq_length=262144, context_parallel_size=8, **online
    )


def dflash_splitkv_pretrain_config(
    dflash: DFlashConfig,
    *,
    seq_length: int,
    context_parallel_size: int,
    **online: Unpack[OnlineOptions],
) -> DFlashConfigContainer:
    """Return the recipe of any drafter: DFlash's published optimizer and schedule, bf16.

    Args:
        dflash: the drafter.
        seq_length: tokens of a pack.
        context_parallel_size: ranks that share a pack.
        **online: see `OnlineOptions`.

    Source:
        Learning rate 6e-4, cosine, warm-up over 4 % of the steps: DFlash (z-lab).
    """
    communication: dict[str, Any] = {}
    if context_parallel_size > 1:
        communication["cp_comm_type"] = "splitkv"
    return DFlashConfigContainer(
        # Megatron demands it where kernels of several streams must start in order.
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": 1},
        model=DFlashModelConfig.of(
            dflash,
            seq_length=seq_length,
            context_parallel_size=context_parallel_size,
            **communication,
        ),
        dataset=FeatureStoreProvider(**online),
        train=TrainingConfig(train_iters=10_000, micro_batch_size=1, global_batch_size=8),
        validation=ValidationConfig(eval_iters=None, eval_interval=1000),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=6e-4,
            min_lr=0.0,
            weight_decay=_WEIGHT_DECAY,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_fraction=0.04,
            start_weight_decay=_WEIGHT_DECAY,
            end_weight_decay=_WEIGHT_DECAY,
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=True,
        ),
        mixed_precision="bf16_mixed",
        checkpoint=CheckpointConfig(save_interval=1000, ckpt_format="torch_dist"),
        logger=LoggerConfig(log_interval=10),
        # Tokens come from the store; Bridge wants a tokenizer that is no larger than the model.
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(use_gloo_process_groups=False),
    )
