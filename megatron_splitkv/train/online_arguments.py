"""``--online-target``: the target computes the features in the job, and no store holds them.

The store still says which documents there are and which target they are for. What a feature store
says about its features, taps and dtype, is settled here instead.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_splitkv.comm.once_a_node import once_a_node
from megatron_splitkv.config import ONLINE_TARGETS, ConfigError, layer_ids, require_choice
from megatron_splitkv.data.meta import StoreMeta, spread_target_layer_ids
from megatron_splitkv.data.shard import FEATURE_DTYPES
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import (
    import_transformers,
    load_target,
    load_target_config,
    target_checksum,
)
from megatron_splitkv.export.folder import read_config
from megatron_splitkv.online.hf_target import HFTarget, check_lengths
from megatron_splitkv.online.source import OnlineTarget

OPTION = "--online-target"

# Called once there are process groups.
type OpenTarget = Callable[[ProcessGroupCollection], OnlineTarget]


def add_online_arguments(group: Any) -> None:
    """Add the options of a target that runs in the job.

    Args:
        group: of Megatron's parser.
    """
    group.add_argument(
        OPTION,
        metavar="FOLDER",
        help="Run the target of this local Hugging Face folder in the job. The features never "
        "touch the disk: --feature-store may be one of `splitkv prepare --tokens-only`, and "
        "features that it has are not read. Every tensor-parallel rank has the whole target with "
        "the backend hf.",
    )
    group.add_argument(
        "--online-target-backend",
        metavar="NAME",
        help=f"What runs the target: one of {', '.join(ONLINE_TARGETS)}. hf: transformers, whole "
        "documents on each context-parallel rank. megatron: a Megatron GPT, split over tensor- and "
        "context-parallel ranks. Default: hf.",
    )
    group.add_argument(
        "--target-layer-ids",
        type=layer_ids,
        metavar="I,J,...",
        help=f"With {OPTION}: layers whose outputs the drafter reads, 0-based. Default: the "
        "store's, or the initial drafter's, or up to five spread ones.",
    )


def check_online_arguments(args: argparse.Namespace) -> None:
    """Refuse what the command line alone shows to be wrong; completes the backend in place.

    Args:
        args: parsed.

    Raises:
        ConfigError: an unknown backend, or an option that means nothing without a target.
    """
    args.online_target_backend = check_online_choice(args.online_target, args.online_target_backend)
    if args.online_target is None and args.target_layer_ids is not None:
        raise _means_nothing("--target-layer-ids", OPTION)


def check_online_choice(
    folder: str | None,
    backend: str | None,
    option: str = OPTION,
    backend_option: str = "--online-target-backend",
) -> str | None:
    """Refuse an unknown backend, and one that means nothing without a target.

    Args:
        folder: the target in the job, if any.
        backend: what runs it; None lets us choose.
        option: what named the folder.
        backend_option: what named the backend.

    Returns:
        The backend; None without a target.

    Raises:
        ConfigError: naming the option, the value and the remedy.
    """
    if folder is not None:
        return require_choice(backend_option, backend or "hf", ONLINE_TARGETS)
    if backend is not None:
        raise _means_nothing(backend_option, option)
    return None


def _means_nothing(what: str, option: str) -> ConfigError:
    return ConfigError(
        f"{what} is for a target in the job: add {option} FOLDER, or drop it (the feature store "
        "has its layers)"
    )


def features_meta(args: argparse.Namespace, store: FeatureStore) -> StoreMeta:
    """What training gets as features of a store's documents: the store's own, or the target's.

    Args:
        args: checked. Of a target in the job the tapped layers are completed in place, so that
            those of the first store are those of the next.
        store: documents.

    Returns:
        With a target in the job: the dtype of the store's features if it has any, else that of
        training; final hidden states can be had.

    Raises:
        ConfigError: a store without features and no target, or taps that the target has not.
    """
    if args.online_target is None:
        store.require_features()
        return store.meta
    if args.target_layer_ids is None:
        args.target_layer_ids = _default_taps(args, store.meta)
    return meta_of_target(store.meta, args.target_layer_ids, bf16=args.bf16)


def meta_of_target(meta: StoreMeta, target_layer_ids: tuple[int, ...], *, bf16: bool) -> StoreMeta:
    """What training gets as features of a store's documents from a target in the job.

    Args:
        meta: of the store.
        target_layer_ids: tapped layers.
        bf16: whether training is in bf16; a store that has features decides their dtype instead.

    Raises:
        ConfigError: taps that the target has not.
    """
    training_dtype = "bfloat16" if bf16 else "float32"
    return replace(
        meta,
        target_layer_ids=target_layer_ids,
        dtype=meta.dtype if meta.has_features else training_dtype,
        final_hidden=True,
        has_features=True,
    )


def _default_taps(args: argparse.Namespace, meta: StoreMeta) -> tuple[int, ...]:
    if meta.has_features:
        return meta.target_layer_ids
    num_layers = meta.target.num_layers
    if args.initial_drafter is not None:
        return read_config(args.initial_drafter, num_target_layers=num_layers).target_layer_ids
    return spread_target_layer_ids(num_layers)


def open_online_target(
    args: argparse.Namespace,
    meta: StoreMeta,
    stores: Sequence[FeatureStore],
    *,
    final_hidden: bool,
) -> OpenTarget | None:
    """Open the target that the command line names.

    Args:
        args: validated by Megatron.
        meta: of `features_meta`.
        stores: as for `open_target`.
        final_hidden: likewise.

    Returns:
        What makes the target once there are groups; None without ``--online-target``.

    Raises:
        ConfigError: see `open_target`.
    """
    if args.online_target is None:
        return None
    return open_target(
        args.online_target,
        args.online_target_backend,
        meta,
        stores,
        final_hidden=final_hidden,
        tp_size=args.tensor_model_parallel_size,
        cp_size=args.context_parallel_size,
        transformer_impl=args.transformer_impl,
        gpu=args.local_rank,
    )


def open_target(
    folder: str | os.PathLike[str],
    backend: str,
    meta: StoreMeta,
    stores: Sequence[FeatureStore],
    *,
    final_hidden: bool,
    tp_size: int,
    cp_size: int,
    transformer_impl: str,
    gpu: int,
    option: str = OPTION,
) -> OpenTarget:
    """Check the target in the job, and load what can be loaded without process groups.

    One rank of each node reads the weights to compare their checksum with the stores'; every rank
    reads them to load them. Call it on every rank.

    Args:
        folder: a local Hugging Face folder.
        backend: one of `ONLINE_TARGETS`.
        meta: of `meta_of_target`.
        stores: whose documents will come; all are of one target.
        final_hidden: whether the drafter learns from the target's distribution.
        tp_size: tensor-parallel size.
        cp_size: context-parallel size.
        transformer_impl: whose modules the backend megatron takes.
        gpu: of this rank, where there are any.
        option: what named the folder.

    Returns:
        What makes the target once there are groups.

    Raises:
        ConfigError: no target, another one than the stores', or one that cannot be run.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{option} {folder}: there is no such folder")
    import_transformers()  # or say that it is missing before anything is read
    if backend == "megatron":
        # Imported here: it takes all of Megatron's GPT along.
        from megatron_splitkv.online.gpt_from_hf import check_gpt_from_hf
        from megatron_splitkv.online.megatron_target import build_megatron_target

        check_gpt_from_hf(folder, backend=transformer_impl, tp_size=tp_size)
        _check_same_target(option, folder, meta)
        return lambda groups: build_megatron_target(
            folder,
            meta.target_layer_ids,
            pg_collection=groups,
            backend=transformer_impl,
            final_hidden=final_hidden,
            feature_dtype=FEATURE_DTYPES[meta.dtype],
        )
    longest = max(int(store.lengths.max()) for store in stores)
    check_lengths(load_target_config(folder), longest)
    _check_same_target(option, folder, meta)
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    target = HFTarget(
        load_target(folder, device=device),
        meta,
        cp_size=cp_size,
        final_hidden=final_hidden,
        longest=longest,
    )
    return lambda groups: target


def _check_same_target(option: str, folder: Path, meta: StoreMeta) -> None:
    def check() -> None:
        checksum, target = target_checksum(folder), meta.target
        if checksum != target.checksum:
            raise ConfigError(
                f"{option} {folder} is another target (checksum {checksum}) than the feature "
                f"store's ({target.id!r}, {target.checksum}); name the folder that the store was "
                "prepared with, or prepare a store with this one"
            )

    once_a_node(check)
