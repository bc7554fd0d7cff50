"""What the command line says about packs, and when they are dealt to replicas."""

import argparse

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.train.packing_arguments import (
    check_packing,
    deal_evaluation,
    deal_training,
    pack_cost,
    packed_epochs,
)
from tests.train.launches import LENGTHS, TINY_DRAFTER, parse

DFLASH = DFlashConfig(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=64,
    num_target_layers=6,
    target_layer_ids=(1, 3, 5),
    mask_token_id=63,
    block_size=4,
)


def _args(*argv: str, **values: object) -> argparse.Namespace:
    args = parse([*TINY_DRAFTER, *argv])
    args.consumed_train_samples = args.consumed_valid_samples = 0
    args.data_parallel_size, args.global_batch_size, args.eval_global_batch_size = 2, 8, 4
    vars(args).update(values)
    return args


def test_the_anchor_budget_reaches_the_packs() -> None:
    """Ten documents of six anchors and one of one: two of the ten a pack."""
    lengths, wide = np.array(LENGTHS), ("--seq-length", "192")
    packing = packed_epochs(_args(*wide, "--max-anchors-per-pack", "12"), lengths)
    packs = [packing.pack_documents(i) for i in range(packing.num_packs(0))]
    anchors = np.minimum(lengths - 1, 6)  # --num-anchors 6
    assert len(packs) == 6
    assert max(anchors[pack].sum() for pack in packs) == 12
    assert packed_epochs(_args(*wide), lengths).num_packs(0) == 3


def test_impossible_options_are_refused() -> None:
    check_packing(_args("--max-anchors-per-pack", "1"))
    with pytest.raises(ConfigError, match="--max-anchors-per-pack 0 is too small"):
        check_packing(_args("--max-anchors-per-pack", "0"))
    with pytest.raises(ConfigError, match="phase-transition-iterations is not supported"):
        check_packing(_args(phase_transition_iterations="5"))


def test_training_is_dealt_from_where_the_checkpoint_stood() -> None:
    args = _args(consumed_train_samples=24)
    packing = packed_epochs(args, np.array(LENGTHS))
    dealing = deal_training(args, DFLASH, packing)
    assert dealing is not None
    assert (dealing.start, dealing.global_batch_size, dealing.num_replicas) == (24, 8, 2)
    assert dealing.period is None
    # --decrease-batch-size-if-needed makes steps of six packs for three replicas.
    fewer = deal_training(_args(data_parallel_size=3), DFLASH, packing)
    assert fewer is not None
    assert fewer.global_batch_size == 6


@pytest.mark.parametrize(
    "values",
    [
        {"data_parallel_size": 1},
        {"data_parallel_size": 8},  # a pack for each
        {"rampup_batch_size": [2, 2, 100]},
        {"step_batch_size_schedule": "0:2 100:8"},
    ],
    ids=str,
)
def test_the_canonical_order_stays_where_dealing_changes_nothing_or_batches_vary(
    values: dict[str, object],
) -> None:
    args = _args(**values)
    assert deal_training(args, DFLASH, packed_epochs(args, np.array(LENGTHS))) is None


def test_evaluation_is_dealt_from_where_megatron_s_sampler_begins() -> None:
    args = _args(consumed_valid_samples=12, consumed_train_samples=40)
    packing = packed_epochs(args, np.array(LENGTHS))
    dealing = deal_evaluation(args, DFLASH, packing, period=12)
    assert dealing is not None
    assert (dealing.start, dealing.global_batch_size, dealing.period) == (12, 4, 12)
    args.skip_train = True
    fresh = deal_evaluation(args, DFLASH, packing, period=12)
    assert fresh is not None
    assert fresh.start == 0


def test_costs_are_those_of_the_drafter_s_shapes() -> None:
    cost = pack_cost(DFLASH, num_anchors=6)
    # Forward and two gradients of a trained product, two of three where something is frozen.
    features, keys = 4 * 24 * 8, 2 * 6 * 8 * 24
    attention, feed_forward, head = 2 * 6 * 8 * (24 + 24), 2 * 6 * 3 * 8 * 12, 4 * 8 * 64
    assert cost.context_row == features + keys
    assert cost.draft_row == keys + attention + feed_forward + head
    assert cost.pair == 14 * 4 * 6
    assert (cost.block_size, cost.num_anchors, cost.windows) == (4, 6, (None, None))
