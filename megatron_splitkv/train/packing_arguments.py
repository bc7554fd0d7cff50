"""Command line of packing, and the packs and their dealing that it asks for."""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.dealing import Dealing
from megatron_splitkv.data.pack_cost import PackCost
from megatron_splitkv.data.packing import PackedEpochs
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.scale.dense import dense_flops

# A score and an output are a multiplication and an addition per element of a head; backward makes
# two and a half times as many.
_PAIR_FLOPS = 14


def add_packing_arguments(group: Any) -> None:
    """Add the options of packing.

    Args:
        group: of Megatron's parser.
    """
    group.add_argument(
        "--max-anchors-per-pack",
        type=int,
        metavar="N",
        help="Draft blocks of a pack at most, reckoned as --num-anchors or the document's length - "
        "1, whichever is less, for each of its documents; one that has more by itself gets a pack "
        "of its own. Bounds memory where documents are short. Default: no bound but --seq-length.",
    )


def check_packing(args: argparse.Namespace) -> None:
    """Refuse impossible options of packing.

    Args:
        args: parsed.

    Raises:
        ConfigError: naming the option, the value and the remedy.
    """
    most = args.max_anchors_per_pack
    if most is not None and most < 1:
        raise ConfigError(f"--max-anchors-per-pack {most} is too small; it must be at least 1")
    if getattr(args, "phase_transition_iterations", None):
        raise ConfigError(
            "--phase-transition-iterations is not supported: every phase would begin with the "
            "first packs again; drop it, and change what the phases differ in when you resume"
        )


def packed_epochs(args: argparse.Namespace, lengths: NDArray[np.int64]) -> PackedEpochs:
    """The canonical order of the packs of a store.

    Args:
        args: parsed.
        lengths: of the store's documents.

    Raises:
        ConfigError: see `PackedEpochs`.
    """
    return PackedEpochs(
        lengths,
        args.seq_length,
        args.seed,
        num_anchors=args.num_anchors,
        max_anchors=args.max_anchors_per_pack,
    )


def deal_training(
    args: argparse.Namespace, dflash: DFlashConfig, packing: PackedEpochs
) -> Dealing | None:
    """How training packs are dealt to the data-parallel replicas.

    Args:
        args: validated by Megatron, with the samples that a checkpoint says were consumed.
        dflash: the drafter.
        packing: the canonical order.

    Returns:
        None where the canonical order stays: one replica, one pack for each, or a batch whose size
        changes during the run.
    """
    varies = ("rampup_batch_size", "step_batch_size_schedule")
    if any(getattr(args, name, None) for name in varies):
        return None
    return deal_packs(
        packing,
        dflash,
        args.num_anchors,
        start=args.consumed_train_samples,
        global_batch_size=args.global_batch_size,
        num_replicas=args.data_parallel_size,
    )


def deal_evaluation(
    args: argparse.Namespace, dflash: DFlashConfig, packing: PackedEpochs, period: int
) -> Dealing | None:
    """The same for held-out packs.

    Args:
        args: as for `deal_training`.
        dflash: the drafter.
        packing: the canonical order.
        period: packs of one evaluation.
    """
    return deal_packs(
        packing,
        dflash,
        args.num_anchors,
        start=0 if args.skip_train else args.consumed_valid_samples,  # as Megatron's sampler begins
        global_batch_size=args.eval_global_batch_size,
        num_replicas=args.data_parallel_size,
        period=period,
    )


def deal_packs(
    packing: PackedEpochs,
    dflash: DFlashConfig,
    num_anchors: int,
    *,
    start: int,
    global_batch_size: int,
    num_replicas: int,
    period: int | None = None,
) -> Dealing | None:
    """How packs are dealt to data-parallel replicas by their cost for a drafter.

    Args:
        packing: the canonical order.
        dflash: the drafter.
        num_anchors: of a document.
        start: items that were consumed before.
        global_batch_size: packs of a step over all replicas, rounded down to a multiple of their
            number, as ``--decrease-batch-size-if-needed`` does; Megatron refuses it otherwise.
        num_replicas: data-parallel size.
        period: packs of one evaluation.

    Returns:
        None where the canonical order stays: one replica, or one pack for each.
    """
    batch = global_batch_size // num_replicas * num_replicas
    if num_replicas == 1 or batch <= num_replicas:
        return None
    return Dealing(
        packing,
        pack_cost(dflash, num_anchors).of_documents(packing.lengths),
        start=start,
        global_batch_size=batch,
        num_replicas=num_replicas,
        period=period,
    )


def pack_cost(dflash: DFlashConfig, num_anchors: int) -> PackCost:
    """What documents cost a drafter; the small heads of some kinds are left out.

    Args:
        dflash: shapes.
        num_anchors: of a document.
    """
    none = {"own_queries": 0, "projected_queries": 0, "projected_outputs": 0}
    one = dict.fromkeys(none, 1)
    return PackCost(
        context_row=int(dense_flops(dflash, context_rows=1, key_rows=1, **none).total),
        draft_row=int(dense_flops(dflash, context_rows=0, key_rows=1, **one).total),
        pair=_PAIR_FLOPS * dflash.num_attention_heads * dflash.head_dim,
        block_size=dflash.block_size,
        num_anchors=num_anchors,
        windows=dflash.windows,
    )
