"""Command line of a drafter's training: our argument group, and defaults that fit a drafter.

Megatron's own arguments keep their meaning. What a drafter needs differently from a GPT (norms,
activation, no dropout, a feature store instead of text) becomes a parser default, so that whatever
a user types still wins.
"""

import argparse
import os
from dataclasses import replace
from typing import Any

import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.choice import links_of_group
from megatron_splitkv.comm.links import PRESETS, default_links, links_from
from megatron_splitkv.comm.topology import links_of_launch
from megatron_splitkv.config import CP_COMM_TYPES, KERNELS, PLAN_STRATEGIES
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.train.drafter_arguments import add_drafter_arguments
from megatron_splitkv.train.initial_drafter import add_initial_drafter_argument
from megatron_splitkv.train.online_arguments import add_online_arguments
from megatron_splitkv.train.packing_arguments import add_packing_arguments

# Published recipe of DFlash: warm-up over 4 % of the steps.
_WARMUP_FRACTION = 0.04
_HEAD_WIDTHS = (128, 64, 32, 16, 8)

_DRAFTER_DEFAULTS: dict[str, Any] = {
    # architecture
    "num_layers": 5,
    "swiglu": True,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "position_embedding_type": "none",  # the drafter rotates by explicit positions
    "rotary_base": 1_000_000,
    "num_query_groups": None,
    "untie_embeddings_and_output_weights": True,
    "tokenizer_type": "NullTokenizer",  # tokens come from the store
    # The same weights at every tensor and context parallel size; a drafter is small enough.
    "use_cpu_initialization": True,
    # parallelism
    "cp_comm_type": ["splitkv"],
    # run
    "micro_batch_size": 1,
    "seq_length": 4096,
    "lr": 6e-4,
    "lr_decay_style": "cosine",
    "log_interval": 10,
    "tensorboard_log_interval": None,
    "eval_iters": None,  # one pass over the validation store
    "eval_interval": 1000,
    "dataloader_type": "single",
    # Megatron would run suspicious steps twice; the check for NaN stays.
    "rerun_mode": "disabled",
    # The other format of a distributed optimizer's checkpoint loads at another data-parallel size,
    # but at no other tensor-parallel size.
    "dist_ckpt_optim_fully_reshardable": True,
}

_CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "use_gloo_process_groups": False,  # the default groups are gloo already
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "async_strategy": "mcore",  # of --async-save; the other one is made for GPUs
    "num_workers": 0,  # loader processes would take the cores from the ranks
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group to Megatron's parser and replace defaults: Megatron's `extra_args_provider`."""
    group = parser.add_argument_group(
        "split-KV drafter training",
        "A drafter is trained on a feature store that `splitkv prepare` wrote. Hidden size, "
        "vocabulary, tapped layers and mask token come from the store. --calculate-per-token-loss "
        "is required. Use with --context-parallel-size P --cp-comm-type splitkv; to compare, also "
        f"{', '.join(name for name in CP_COMM_TYPES if name != 'splitkv')}; or auto, the quickest "
        "by estimate.",
    )
    group.add_argument(
        "--feature-store", metavar="DIR", help="Feature store to train on. Required."
    )
    group.add_argument(
        "--valid-feature-store",
        metavar="DIR",
        help="Feature store of held-out documents; without one there is no evaluation.",
    )
    group.add_argument(
        "--verify-feature-store",
        default="auto",
        metavar="HOW",
        help="'size' checks the size of every file at start, 'full' its checksum too, 'auto' "
        "(default) is full for stores of up to 1 GiB.",
    )
    group.add_argument(
        "--target-id",
        metavar="NAME",
        help="Refuse a feature store of any other target.",
    )
    group.add_argument(
        "--mask-token-id",
        type=int,
        metavar="ID",
        help="Existing, unused token that stands for 'to be drafted'. Default: the store's.",
    )
    group.add_argument(
        "--num-anchors",
        type=int,
        default=512,
        metavar="N",
        help="Draft blocks per document and step. Default: 512.",
    )
    add_packing_arguments(group)
    add_drafter_arguments(group)
    add_initial_drafter_argument(group)
    add_online_arguments(group)
    group.add_argument(
        "--plan-strategy",
        metavar="NAME",
        help="How context rows are assigned to context-parallel ranks: one of "
        f"{', '.join(PLAN_STRATEGIES)}, or auto: for every pack the cheaper of balanced and "
        "balanced-local. Default: balanced, or what --cp-comm-type auto chooses.",
    )
    group.add_argument(
        "--chunks-per-rank",
        type=int,
        metavar="J",
        help="Context chunks that each rank gets. Default: as many as keep a chunk one kernel "
        "tile long, at least 4 and at most 32; packs too short for the wish take fewer.",
    )
    group.add_argument(
        "--attention-kernel",
        default="auto",
        metavar="NAME",
        help=f"Attention kernel: one of {', '.join(KERNELS)}. Default: auto.",
    )
    group.add_argument(
        "--splitkv-gather",
        default="auto",
        metavar="WHAT",
        help="What context parallelism gathers: projected queries (q) or the rows before their "
        "projection (hidden). Default: auto, the quicker by estimate.",
    )
    group.add_argument(
        "--splitkv-scatter",
        default="auto",
        metavar="WHAT",
        help="What goes back to the owners: attention outputs (heads) or projected ones (proj). "
        "Default: auto.",
    )
    group.add_argument(
        "--splitkv-query-cast",
        default="auto",
        metavar="WHOM",
        help="Who gets a query: all ranks, or the group of those that hold keys which it sees. "
        "Default: auto, group where it moves clearly less. Made for --plan-strategy "
        "balanced-local.",
    )
    group.add_argument(
        "--splitkv-save",
        default="gathered",
        metavar="WHAT",
        help="What backward keeps of the queries (of keys and values with --cp-comm-type "
        "all_gather): gathered, or only the rank's own, to be gathered again. --recompute-modules "
        "core_attn is own. Default: gathered.",
    )
    group.add_argument(
        "--splitkv-fp32-reduce",
        action="store_true",
        help="Send partial outputs and gradients in fp32, twice the bytes. They are added in fp32 "
        "either way.",
    )
    group.add_argument(
        "--splitkv-ranks-per-node",
        type=int,
        metavar="N",
        help="Ranks of the job on each node, numbered node by node. Partial outputs and gradients "
        "are added up inside a node before they leave it; 1 turns that off. Default: what torchrun "
        "says (LOCAL_WORLD_SIZE).",
    )
    group.add_argument(
        "--links",
        metavar="PRESET|FILE",
        help="The machine that every 'auto' estimates for: a file that `splitkv bench links "
        f"--save` wrote, or one of {', '.join(PRESETS)}. Default: nvlink-400g on GPUs, else "
        "loopback.",
    )
    parser.set_defaults(**_DRAFTER_DEFAULTS)
    if not torch.cuda.is_available():
        parser.set_defaults(**_CPU_DEFAULTS)
    return parser


def splitkv_options(args: argparse.Namespace) -> SplitKVOptions:
    """What the command line says about split-KV's communication.

    Raises:
        ConfigError: an unknown name, choices that exclude each other, or a bad file of links.
    """
    options = SplitKVOptions(
        gather=args.splitkv_gather,
        scatter=args.splitkv_scatter,
        query_cast=args.splitkv_query_cast,
        save=args.splitkv_save,
        fp32_reduce=args.splitkv_fp32_reduce,
        ranks_per_node=args.splitkv_ranks_per_node,
    )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    named = default_links(device_type) if args.links is None else links_from(args.links)
    links = links_of_launch(named, options.ranks_per_node)
    return replace(options, links=links_of_group(links, max(1, args.tensor_model_parallel_size)))


def complete_arguments(args: argparse.Namespace, meta: StoreMeta) -> None:
    """Fill in, in place, what the user left open and the store or other arguments decide.

    Args:
        args: parsed, not yet validated by Megatron.
        meta: what the training store says about its target.
    """
    _default(args, "hidden_size", meta.target.hidden_size)
    _default(args, "vocab_size", meta.target.vocab_size)
    _default(args, "mask_token_id", meta.target.mask_token_id)
    if args.num_attention_heads is None:
        width = args.kv_channels or next(
            (w for w in _HEAD_WIDTHS if args.hidden_size % w == 0), args.hidden_size
        )
        args.num_attention_heads = max(1, args.hidden_size // width)
    if args.num_query_groups is None:
        args.num_query_groups = 1 if args.group_query_attention else args.num_attention_heads
    args.group_query_attention = True
    _default(args, "max_position_embeddings", args.seq_length)

    if args.lr_warmup_fraction is None and not (args.lr_warmup_iters or args.lr_warmup_samples):
        args.lr_warmup_fraction = _WARMUP_FRACTION
    _default(args, "tensorboard_log_interval", args.log_interval)
    if args.save is not None:
        _default(args, "save_interval", args.train_iters)
        _default(args, "tensorboard_dir", os.path.join(args.save, "tensorboard"))
    # No padding rows in the frozen head: it is split over tensor-parallel ranks as it is.
    args.padded_vocab_size = args.vocab_size


def _default(args: argparse.Namespace, name: str, value: Any) -> None:
    if getattr(args, name) is None:
        setattr(args, name, value)
