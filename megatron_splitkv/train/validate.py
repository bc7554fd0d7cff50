"""Everything about a launch that can be refused before the first collective.

Each check raises a `ConfigError` of one line. All of them read the command line, the environment
and files, never another rank, so every rank comes to the same end.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.strategies import check_heads
from megatron_splitkv.config import (
    CP_COMM_TYPES,
    KERNELS,
    PLAN_STRATEGIES,
    ConfigError,
    require_choice,
)
from megatron_splitkv.data.meta import StoreMeta, check_mask_token
from megatron_splitkv.drafter.config import LOSS_WEIGHTS, DFlashConfig
from megatron_splitkv.plan.hypergraph import import_kahypar
from megatron_splitkv.train.arguments import splitkv_options
from megatron_splitkv.train.online_arguments import check_online_arguments
from megatron_splitkv.train.packing_arguments import check_packing
from megatron_splitkv.train.unsupported import check_unsupported


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what the command line alone shows to be wrong.

    Args:
        args: parsed, defaults not yet completed from the store.

    Raises:
        ConfigError: naming the option, the value, the limit and the remedy.
    """
    if args.feature_store is None:
        raise ConfigError("--feature-store is missing; name a folder that `splitkv prepare` wrote")
    if not args.calculate_per_token_loss:
        raise ConfigError(
            "--calculate-per-token-loss is missing; without it Megatron averages over ranks and "
            "micro-batches that hold different numbers of trained tokens, which biases the "
            "gradients: add it"
        )
    if not args.train_iters and not args.train_samples:
        raise ConfigError("neither --train-iters nor --train-samples is given; give one")
    if args.plan_strategy is not None:
        require_choice("--plan-strategy", args.plan_strategy, (*PLAN_STRATEGIES, "auto"))
        if args.plan_strategy == "hypergraph":
            import_kahypar()  # now, not when the first pack is planned
    require_choice("--attention-kernel", args.attention_kernel, KERNELS)
    _check_loss(args)
    check_online_arguments(args)
    check_packing(args)
    options = splitkv_options(args)
    check_cp_comm_type(args.cp_comm_type, args.num_layers, options)
    selective = args.recompute_activations or args.recompute_granularity == "selective"
    modules = args.recompute_modules or ["core_attn"]  # Megatron's default
    if options.gather == "hidden" and selective and "core_attn" in modules:
        raise ConfigError(
            "--recompute-modules core_attn gathers projected queries again in backward, and "
            "--splitkv-gather hidden gathers none; use --splitkv-gather q, or full recomputation"
        )
    require_choice("--verify-feature-store", args.verify_feature_store, ("auto", "size", "full"))
    require_choice("--dataloader-type", args.dataloader_type, ("single",))
    require_choice("--ckpt-format", args.ckpt_format, ("torch_dist",))
    require_choice("--optimizer", args.optimizer, ("adam", "sgd"))
    require_choice("--position-embedding-type", args.position_embedding_type, ("none",))
    if args.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs a GPU; drop it, gloo is the default")
    _check_sizes(args)
    _check_parallelism(args)
    check_unsupported(args)


def check_cp_comm_type(
    cp_comm_type: Sequence[str], num_layers: int, options: SplitKVOptions = SplitKVOptions()
) -> None:
    """Refuse unknown communication types, a list of another length, and options of no layer.

    Args:
        cp_comm_type: one value for all layers, or one per layer.
        num_layers: layers of the drafter.
        options: what the command line says about split-KV.
    """
    for value in cp_comm_type:
        require_choice("--cp-comm-type", value, (*CP_COMM_TYPES, "auto"))
    if len(cp_comm_type) not in (1, num_layers):
        raise ConfigError(
            f"--cp-comm-type has {len(cp_comm_type)} values for {num_layers} layers; give one "
            f"for all layers, or {num_layers}"
        )
    if not {"splitkv", "auto"} & set(cp_comm_type):
        options.check_strategy("all_gather" if "all_gather" in cp_comm_type else cp_comm_type[0])


def _check_sizes(args: argparse.Namespace) -> None:
    if args.micro_batch_size != 1:
        raise ConfigError(
            f"--micro-batch-size {args.micro_batch_size} is not supported: a micro-batch is one "
            "pack of documents; use 1 and raise --seq-length or --global-batch-size"
        )
    if args.eval_micro_batch_size not in (None, 1):
        raise ConfigError(
            f"--eval-micro-batch-size {args.eval_micro_batch_size} is not supported; use 1"
        )
    for option, value, least in (
        ("--block-size", args.block_size, 2),
        ("--num-anchors", args.num_anchors, 1),
        ("--seq-length", args.seq_length, 1),
        ("--num-layers", args.num_layers, 1),
        ("--train-iters", args.train_iters, 1),
        ("--log-interval", args.log_interval, 1),
        ("--eval-interval", args.eval_interval, 1),
        ("--eval-iters", args.eval_iters, 0),
        ("--seed", args.seed, 0),
        ("--tensor-model-parallel-size", args.tensor_model_parallel_size, 1),
        ("--context-parallel-size", args.context_parallel_size, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option} {value} is too small; it must be at least {least}")
    if args.chunks_per_rank is not None and args.chunks_per_rank < 1:
        raise ConfigError(
            f"--chunks-per-rank {args.chunks_per_rank} is too small; it must be at least 1"
        )
    if args.seq_length < args.context_parallel_size:
        raise ConfigError(
            f"--seq-length {args.seq_length} gives {args.context_parallel_size} context-parallel "
            "ranks less than a row each; raise it or lower --context-parallel-size"
        )
    # exp(-69) is 1e-30: weights below that are lost in the sums of fp32.
    least_gamma = (args.block_size - 1) / 69
    if not args.loss_decay_gamma > least_gamma:
        raise ConfigError(
            f"--loss-decay-gamma {args.loss_decay_gamma} is too small: the last of "
            f"{args.block_size} slots would weigh nothing; it must be above {least_gamma:.3g}"
        )
    _check_warm_up(args)


def _check_loss(args: argparse.Namespace) -> None:
    if args.loss_weights is not None:
        require_choice("--loss-weights", args.loss_weights, LOSS_WEIGHTS)
    share = args.distillation_weight
    if share is not None and not 0 <= share <= 1:
        raise ConfigError(
            f"--distillation-weight {share} must be in [0, 1]: it is the share of the divergence "
            "in the loss"
        )
    if args.drafter == "dflash":
        return
    for option, value, default in (
        ("--loss-weights", args.loss_weights, "decay"),
        ("--distillation-weight", share, 0.0),
    ):
        if value not in (None, default):
            raise ConfigError(
                f"{option} {value} is for --drafter dflash: {args.drafter} has a loss of its own; "
                "drop it"
            )


def _check_warm_up(args: argparse.Namespace) -> None:
    fraction, steps = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and not 0 <= fraction < 1:
        raise ConfigError(f"--lr-warmup-fraction {fraction} must be in [0, 1)")
    if steps and args.train_iters and steps >= args.train_iters:
        raise ConfigError(
            f"--lr-warmup-iters {steps} leaves nothing of --train-iters {args.train_iters}; "
            "warm up over fewer"
        )


def _check_parallelism(args: argparse.Namespace) -> None:
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * cp):
        raise ConfigError(
            f"{args.world_size} ranks cannot be split into groups of {tp} x {cp} "
            "(--tensor-model-parallel-size x --context-parallel-size); start a multiple of "
            f"{tp * cp}"
        )
    if cp > 1 and args.seq_length % (2 * cp):
        raise ConfigError(
            f"--seq-length {args.seq_length} is not a multiple of 2 x --context-parallel-size = "
            f"{2 * cp}, as Megatron demands; a multiple of 24 serves every size from 1 to 4"
        )


def check_against_store(args: argparse.Namespace, meta: StoreMeta) -> None:
    """Refuse arguments that contradict the training store.

    Args:
        args: completed by `complete_arguments`.
        meta: what the training store says about its target.
    """
    target = meta.target
    if args.target_id is not None and args.target_id != target.id:
        raise ConfigError(
            f"{args.feature_store} holds features of target {target.id!r}, --target-id is "
            f"{args.target_id!r}; use a store of that target"
        )
    for option, value, of_target in (
        ("--hidden-size", args.hidden_size, target.hidden_size),
        ("--vocab-size", args.vocab_size, target.vocab_size),
    ):
        if value != of_target:
            raise ConfigError(
                f"{option} {value} differs from the target's {of_target}: embedding and head are "
                "the target's; drop the option"
            )
    check_mask_token(replace(target, mask_token_id=args.mask_token_id))
    tp = args.tensor_model_parallel_size
    for name, heads in (
        ("--num-attention-heads", args.num_attention_heads),
        ("--num-query-groups", args.num_query_groups),
    ):
        if heads % tp:
            raise ConfigError(
                f"{name} {heads} is not divisible by --tensor-model-parallel-size {tp}; change one"
            )
    if "a2a" in args.cp_comm_type:
        check_heads(
            args.num_attention_heads // tp, args.num_query_groups // tp, args.context_parallel_size
        )


def check_teacher(dflash: DFlashConfig, path: str, meta: StoreMeta) -> None:
    """Refuse a loss that learns from the target's distribution on a store that does not have it.

    Args:
        dflash: the drafter with its loss.
        path: the store.
        meta: what it says about itself.
    """
    if dflash.needs_final_hidden and not meta.final_hidden:
        what = (
            f"--distillation-weight {dflash.distillation_weight}"
            if dflash.kind == "dflash"
            else f"--drafter {dflash.kind}"
        )
        raise ConfigError(
            f"{what} learns from the target's distribution, and {path} has no final hidden states; "
            "prepare it with splitkv prepare --final-hidden"
        )


def check_same_target(path: str, meta: StoreMeta, other_path: str, other: StoreMeta) -> None:
    """Refuse two stores of different targets or with different tapped layers."""
    if meta.target.checksum != other.target.checksum:
        raise ConfigError(
            f"{other_path} holds features of another target ({other.target.id!r}, checksum "
            f"{other.target.checksum}) than {path} ({meta.target.id!r}, {meta.target.checksum}); "
            "prepare both with the same target"
        )
    if meta.target_layer_ids != other.target_layer_ids:
        raise ConfigError(
            f"{other_path} taps layers {list(other.target_layer_ids)}, {path} taps "
            f"{list(meta.target_layer_ids)}; prepare both with the same layers"
        )
