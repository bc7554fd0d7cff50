"""``--online-target``: the target computes the features in the job, and no store holds them.

The store still says which documents there are and which target they are for. What a feature store
says about its features, taps and dtype, is settled here instead.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_splitkv.config import ONLINE_TARGETS, ConfigError, layer_ids, require_choice
from megatron_splitkv.data.meta import StoreMeta, spread_target_layer_ids
from megatron_splitkv.data.shard import FEATURE_DTYPES
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.target import import_transformers, load_target, target_checksum
from megatron_splitkv.export.folder import read_config
from megatron_splitkv.online.hf_target import HFTarget
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
    if args.online_target is not None:
        args.online_target_backend = require_choice(
            "--online-target-backend", args.online_target_backend or "hf", ONLINE_TARGETS
        )
        return
    for option, value in (
        ("--online-target-backend", args.online_target_backend),
        ("--target-layer-ids", args.target_layer_ids),
    ):
        if value is not None:
            raise ConfigError(
                f"{option} is for a target in the job: add {OPTION} FOLDER, or drop it (the "
                "feature store has its layers)"
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
    meta = store.meta
    if args.target_layer_ids is None:
        args.target_layer_ids = _default_taps(args, meta)
    training_dtype = "bfloat16" if args.bf16 else "float32"
    return replace(
        meta,
        target_layer_ids=args.target_layer_ids,
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
    """Check the target in the job, and load what can be loaded without process groups.

    Every rank reads the weights twice: to compare their checksum with the stores', and to load
    them.

    Args:
        args: validated by Megatron.
        meta: of `features_meta`.
        stores: whose documents will come; all are of one target.
        final_hidden: whether the drafter learns from the target's distribution.

    Returns:
        What makes the target once there are groups; None without ``--online-target``.

    Raises:
        ConfigError: no target, another one than the stores', or one that cannot be run.
    """
    if args.online_target is None:
        return None
    folder = Path(args.online_target)
    if not folder.exists():
        raise ConfigError(f"{OPTION} {folder}: there is no such folder")
    import_transformers()  # or say that it is missing before anything is read
    if args.online_target_backend == "megatron":
        return _megatron_target(args, folder, meta, final_hidden)
    _check_same_weights(folder, meta)
    on_gpu = torch.cuda.is_available()
    target = HFTarget(
        load_target(folder, device=torch.device("cuda", args.local_rank) if on_gpu else "cpu"),
        meta,
        cp_size=args.context_parallel_size,
        final_hidden=final_hidden,
        longest=max(int(store.lengths.max()) for store in stores),
    )
    return lambda groups: target


def _megatron_target(
    args: argparse.Namespace, folder: Path, meta: StoreMeta, final_hidden: bool
) -> OpenTarget:
    # Imported here: it takes all of Megatron's GPT along.
    from megatron_splitkv.online.gpt_from_hf import check_gpt_from_hf
    from megatron_splitkv.online.megatron_target import build_megatron_target

    backend = args.transformer_impl
    check_gpt_from_hf(folder, backend=backend, tp_size=args.tensor_model_parallel_size)
    _check_same_weights(folder, meta)
    return lambda groups: build_megatron_target(
        folder,
        meta.target_layer_ids,
        pg_collection=groups,
        backend=backend,
        final_hidden=final_hidden,
        feature_dtype=FEATURE_DTYPES[meta.dtype],
    )


def _check_same_weights(folder: Path, meta: StoreMeta) -> None:
    checksum, target = target_checksum(folder), meta.target
    if checksum != target.checksum:
        raise ConfigError(
            f"{OPTION} {folder} is another target (checksum {checksum}) than the feature store's "
            f"({target.id!r}, {target.checksum}); name the folder that the store was prepared with"
        )
