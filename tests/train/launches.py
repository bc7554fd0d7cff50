"""Small stores and command lines for the tests of training."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.testing.synthetic import make_synthetic_store
from megatron_splitkv.train.arguments import add_arguments
from megatron_splitkv.train.drafter_arguments import complete_drafter_arguments

HIDDEN_SIZE = 32
VOCAB_SIZE = 64
# Odd lengths: no context-parallel size divides them.
LENGTHS = (70, 50, 20, 63, 41, 30, 57, 9, 2, 1, 44, 61)

# The smallest drafter that exercises everything: GQA, two layers, overlapping anchors.
TINY_DRAFTER = (
    "--calculate-per-token-loss",
    *("--num-layers", "2", "--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--kv-channels", "8", "--ffn-hidden-size", "48", "--seq-length", "96"),
    *("--block-size", "4", "--num-anchors", "6", "--lr", "1e-2"),
)


def make_store(folder: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> FeatureStore:
    """A store of random documents; documents shorter than the prompt of 1 carry no loss."""
    return make_synthetic_store(
        folder,
        lengths,
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        prompt_length=1,
        seed=seed,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line as the entry point does, in this process, for one rank."""
    from megatron.training.arguments import parse_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pretrain_dflash", *argv])
        patch.setenv("RANK", os.environ.get("RANK", "0"))
        args = parse_args(add_arguments)
    complete_drafter_arguments(args)
    return args
