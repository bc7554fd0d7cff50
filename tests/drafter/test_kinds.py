"""Kinds of drafters: what each adds, and how files find theirs again."""

import json
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import pytest

from megatron_splitkv.config import DRAFTERS, ConfigError
from megatron_splitkv.drafter import DFlashConfig, DominoConfig, DSparkConfig
from megatron_splitkv.drafter.kinds import config_class, config_from_json, load_config
from tests.drafter.harness import TINY

SHARED = {f.name: getattr(TINY, f.name) for f in fields(TINY)}
DOMINO = DominoConfig(**SHARED, emb_dim=5, gru_hidden_dim=6)
DSPARK = DSparkConfig(**SHARED, markov_rank=3)


def test_every_kind_has_its_configuration() -> None:
    assert [config_class(kind).kind for kind in DRAFTERS] == list(DRAFTERS)
    with pytest.raises(
        ConfigError, match=r"drafter 'eagle' is not known; .*dflash, domino, dspark"
    ):
        config_class("eagle")


@pytest.mark.parametrize("config", [TINY, DOMINO, DSPARK], ids=lambda c: c.kind)
def test_a_file_gives_back_the_kind_that_it_was_written_by(
    config: DFlashConfig, tmp_path: Path
) -> None:
    config.save(tmp_path / "drafter.json")
    assert load_config(tmp_path / "drafter.json") == config
    assert type(load_config(tmp_path / "drafter.json")) is type(config)
    assert json.loads(config.to_json())["drafter"] == config.kind


def test_files_from_before_there_were_kinds_are_of_dflash() -> None:
    values = json.loads(TINY.to_json())
    for name in ("drafter", "layer_types", "sliding_window", "input_embedding_scale"):
        del values[name]
    assert config_from_json(json.dumps(values)) == TINY


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of a domino drafter, not of dflash"):
        DFlashConfig.from_json(DOMINO.to_json())
    for text, said in (
        ("[1]", "not a drafter configuration"),
        ("{", "not a drafter configuration"),
        ('{"drafter": "x"}', "'x' is not known"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"bad\.json: .*{said}"):
            load_config(tmp_path / "bad.json")


def test_which_slots_predict_what() -> None:
    unshifted = replace(DOMINO, shift_label=False)
    assert [c.label_shift for c in (TINY, unshifted, DOMINO, DSPARK)] == [0, 0, 1, 1]
    assert [c.first_trained_slot for c in (TINY, unshifted, DOMINO, DSPARK)] == [1, 1, 0, 0]
    assert [c.num_proposals for c in (TINY, unshifted, DOMINO, DSPARK)] == [3, 3, 4, 4]
    default = {f.name: f.default for f in fields(DSparkConfig)}
    assert (default["block_size"], default["loss_decay_gamma"]) == (7, 4.0)


@pytest.mark.parametrize("config", [DOMINO, DSPARK], ids=lambda c: c.kind)
def test_heads_count_among_the_parameters(config: DFlashConfig) -> None:
    heads = sum(prod(shape) for shape in config.head_shapes().values())
    assert config.num_parameters() == TINY.num_parameters() + heads
    assert heads > 0


def test_layers_that_slide() -> None:
    mixed = replace(TINY, layer_types=("sliding_attention", "full_attention"), sliding_window=5)
    assert mixed.windows == (5, None)
    assert TINY.windows == (None, None)
    assert TINY.layer_types == ("full_attention",) * 2
    for change, said in (
        ({"layer_types": ("full_attention",)}, "names 1 layers, the drafter has 2"),
        ({"layer_types": ("full", "full")}, "layer type 'full' is not known"),
        ({"sliding_window": 4}, "no layer slides"),
        ({"layer_types": ("sliding_attention",) * 2}, "need a sliding_window of at least 1"),
        ({"input_embedding_scale": 0.0}, "input_embedding_scale is 0.0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"final_logit_softcapping": float("inf")}, "must be positive and finite"),
        ({"input_embedding_scale": float("inf")}, "must be positive and finite"),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 1.5}, "window 1.5 must"),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 2**63}, "at most 2"),
        ({"block_size": 4.5}, "block_size 4.5 must be at least 0, and an int"),
        ({"hidden_size": 32.0}, "hidden_size 32.0 must be at least 1, and an int"),
        ({"mask_token_id": 60.0}, "mask_token_id 60.0"),
        ({"target_layer_ids": (1.0,)}, "target_layer_ids 1.0"),
    ):
        with pytest.raises(ConfigError, match=said):
            replace(TINY, **change)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (DOMINO, {"emb_dim": 0}),
        (DOMINO, {"gru_hidden_dim": 0}),
        (DOMINO, {"pure_draft_prefix_len": 5}),
        (DOMINO, {"base_loss_decay_ratio": 0.0}),
        (DSPARK, {"markov_rank": 0}),
        (DSPARK, {"markov_head_type": "gru"}),
        (DSPARK, {"l1_weight": -0.1}),
        (DSPARK, {"ce_weight": float("inf")}),
    ],
)
def test_impossible_heads_are_named(config: DFlashConfig, change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(config, **change)
