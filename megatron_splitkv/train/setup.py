"""From the command line to everything that a training run needs, checked, before any collective."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig

from megatron_splitkv import compat
from megatron_splitkv.config import ConfigError, refuse_unknown_options
from megatron_splitkv.cpu import enable_cpu_mode
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.transformer_config import check_transformer_config
from megatron_splitkv.loss import check_token_count
from megatron_splitkv.train.arguments import add_arguments, complete_arguments
from megatron_splitkv.train.drafter_arguments import complete_drafter_arguments, drafter_config
from megatron_splitkv.train.drafter_file import check_checkpoint_folder, write_drafter_config
from megatron_splitkv.train.initial_drafter import (
    check_target,
    read_initial_weights,
    take_architecture,
    typed_options,
)
from megatron_splitkv.train.online_arguments import OpenTarget, features_meta, open_online_target
from megatron_splitkv.train.packing_arguments import packed_epochs
from megatron_splitkv.train.resume import check_resumable
from megatron_splitkv.train.strategy_choice import resolve_auto
from megatron_splitkv.train.validate import (
    check_against_store,
    check_arguments,
    check_same_target,
    check_teacher,
)

_FULL_VERIFICATION_BYTES = 1 << 30


@dataclass(frozen=True)
class TrainingSetup:
    """A checked launch.

    Args:
        args: Megatron's arguments, validated and global.
        config: Megatron's configuration of the drafter's modules.
        dflash: the drafter.
        store: documents to train on.
        valid_store: held-out documents, if any.
        initial_weights: whole tensors to start from, by Megatron's names; the model provider
            empties it.
        open_target: makes the target that computes features in the job; None if the stores have
            them.
    """

    args: argparse.Namespace
    config: TransformerConfig
    dflash: DFlashConfig
    store: FeatureStore
    valid_store: FeatureStore | None
    initial_weights: dict[str, torch.Tensor] | None = None
    open_target: OpenTarget | None = None


def prepare_training() -> TrainingSetup:
    """Parse and check the command line, and publish it as Megatron's global arguments.

    No process group exists yet when this returns. Rank 0 has written `drafter_config.json` into
    ``--save``.

    Raises:
        ConfigError: anything that the user has to mend.
    """
    # Megatron demands it where kernels of several streams must start in order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "WORLD_SIZE" not in os.environ:  # no launcher: one process is the whole job
        os.environ.setdefault("RANK", "0")  # or Megatron wonders aloud which rank this is
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    parsers: list[argparse.ArgumentParser] = []

    def complete_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        add_arguments(parser)
        # Megatron's usage, hundreds of lines, would hide the line that matters.
        parser.usage = "%(prog)s [options], which --help lists"
        refuse_unknown_options(parser, sys.argv[1:])
        return parser

    args = compat.parse_args(complete_parser)
    enable_cpu_mode()
    compat.skip_missing_dataset_helpers()
    compat.leave_out_gpt_estimates()
    compat.mend_distributed_optimizer()

    take_architecture(args, typed_options(parsers[0], sys.argv[1:]))
    complete_drafter_arguments(args)
    check_arguments(args)
    store = open_store(args.feature_store, args.verify_feature_store)
    # No checkpoint holds them, so nothing else notices when they are not what was trained with.
    store.check_frozen()
    meta = features_meta(args, store)
    valid_store = None
    if args.valid_feature_store is not None:
        valid_store = open_store(args.valid_feature_store, args.verify_feature_store)
        check_same_target(
            args.feature_store, meta, args.valid_feature_store, features_meta(args, valid_store)
        )
    for documents in (store, valid_store):
        if documents is not None:  # packing refuses documents that are longer than a pack
            packed_epochs(args, documents.lengths)
    check_target(args, meta)
    complete_arguments(args, meta)
    _complete_evaluation(args, valid_store)
    check_against_store(args, meta)
    compat.validate_args(args)
    reason = resolve_auto(args, store)
    if reason is not None and args.rank == 0:
        print(reason, flush=True)

    dflash = drafter_config(args, meta)
    _check_token_count(args, store, dflash)
    for path, documents in ((args.feature_store, store), (args.valid_feature_store, valid_store)):
        if documents is not None:
            check_teacher(dflash, path, features_meta(args, documents))
    config = compat.transformer_config(args)
    check_transformer_config(config, dflash)
    for option, folder in (("--load", args.load), ("--save", args.save)):
        if folder is not None:
            check_checkpoint_folder(option, folder, dflash, store.meta.target)
    check_resumable(args)
    initial_weights = read_initial_weights(args, dflash, store)
    open_target = open_online_target(
        args,
        meta,
        [documents for documents in (store, valid_store) if documents is not None],
        final_hidden=dflash.needs_final_hidden,
    )
    if args.save is not None:
        check_writable("--save", args.save)
    if args.save is not None and args.rank == 0:
        write_drafter_config(args.save, dflash, store.meta.target)
    compat.publish_args(args)
    return TrainingSetup(args, config, dflash, store, valid_store, initial_weights, open_target)


def check_writable(option: str, folder: str) -> None:
    """Make a folder, or refuse one that cannot be made or written to.

    Args:
        option: the option that named it.
        folder: its value.

    Raises:
        ConfigError: on every rank that sees the same file system.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {folder} cannot be written to; choose another folder")


def open_store(path: str, verify: str) -> FeatureStore:
    """Open a feature store, checksums verified if that is asked for or cheap.

    Args:
        path: its folder.
        verify: ``size``, ``full``, or ``auto``: full up to 1 GiB.
    """
    if verify == "auto":
        size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        verify = "full" if size <= _FULL_VERIFICATION_BYTES else "size"
    return FeatureStore(path, verify=verify)


def _complete_evaluation(args: argparse.Namespace, valid_store: FeatureStore | None) -> None:
    """By default one evaluation is one pass over the held-out packs."""
    if valid_store is None:
        args.eval_iters = 0
    elif args.eval_iters is None:
        model_parallel = args.tensor_model_parallel_size * args.context_parallel_size
        packs_per_step = (
            args.eval_global_batch_size
            or args.global_batch_size
            or args.world_size // model_parallel
        )
        packs = packed_epochs(args, valid_store.lengths).num_packs(0)
        args.eval_iters = -(-packs // packs_per_step)


def _check_token_count(args: argparse.Namespace, store: FeatureStore, dflash: DFlashConfig) -> None:
    """Refuse a global batch whose loss might overflow Megatron's token count."""
    blocks_per_token = float((np.minimum(args.num_anchors, store.lengths) / store.lengths).max())
    check_token_count(
        int(blocks_per_token * args.seq_length),
        args.block_size,
        args.loss_decay_gamma,
        args.global_batch_size,
        dflash.first_trained_slot,
        dflash.loss_weights,
    )
