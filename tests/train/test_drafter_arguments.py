"""Which drafter a command line asks for."""

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta
from megatron_splitkv.drafter import DFlashConfig, DominoConfig, DSparkConfig
from megatron_splitkv.train.arguments import complete_arguments
from megatron_splitkv.train.drafter_arguments import drafter_config
from tests.train.launches import TINY_DRAFTER, make_store, parse


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> StoreMeta:
    return make_store(tmp_path_factory.mktemp("store")).meta


def config_of(meta: StoreMeta, *argv: str) -> DFlashConfig:
    args = parse(["--feature-store", "x", *TINY_DRAFTER, *argv])
    complete_arguments(args, meta)
    return drafter_config(args, meta)


def test_dflash_is_the_default(meta: StoreMeta) -> None:
    config = config_of(meta)
    assert type(config) is DFlashConfig
    assert (config.block_size, config.loss_decay_gamma) == (4, 7.0)
    assert config.windows == (None, None)


def test_each_kind_with_its_options(meta: StoreMeta) -> None:
    domino = config_of(meta, "--drafter", "domino", "--emb-dim", "8", "--no-shift-label")
    assert isinstance(domino, DominoConfig)
    assert (domino.emb_dim, domino.gru_hidden_dim, domino.shift_label) == (8, 1024, False)
    dspark = config_of(meta, "--drafter", "dspark", "--markov-head-type", "rnn")
    assert isinstance(dspark, DSparkConfig)
    assert (dspark.markov_head_type, dspark.markov_rank) == ("rnn", 256)
    assert dspark.loss_decay_gamma == 4.0


def test_block_and_decay_follow_the_kind() -> None:
    args = parse(["--drafter", "dspark"])
    assert (args.block_size, args.loss_decay_gamma) == (7, 4.0)
    args = parse(["--drafter", "domino"])
    assert (args.block_size, args.loss_decay_gamma) == (16, 7.0)


def test_sliding_layers(meta: StoreMeta) -> None:
    types = ("--layer-types", "sliding_attention", "full_attention", "--sliding-window", "9")
    assert config_of(meta, *types).windows == (9, None)


def test_options_of_another_kind_are_refused() -> None:
    for argv, said in (
        (["--gru-hidden-dim", "8"], "--gru-hidden-dim is of domino drafters, --drafter is dflash"),
        (["--drafter", "domino", "--markov-rank", "8"], "--markov-rank is of dspark drafters"),
        (["--drafter", "eagle"], "--drafter 'eagle' is not known"),
        (["--loss-weights", "dpace", "--loss-decay-gamma", "3"], "has no --loss-decay-gamma"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(argv)
