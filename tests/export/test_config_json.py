"""config.json: every key that some reader looks for, and the way back, for every kind."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.export.config_json import from_config_json, to_config_json
from tests.export.variants import DOMINO, DSPARK, SLIDING, VARIANTS

CONFIG = DFlashConfig.preset("qwen3-8b")

# The public configuration of an 8B target's drafter, as SpecForge ships it.
SPECFORGE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DOMINO_KEYS = {
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": True,
}
DSPARK_KEYS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def test_every_public_key_is_there() -> None:
    values = to_config_json(CONFIG, torch.bfloat16)
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert values["model_type"] == "qwen3"
    assert values["dtype"] == "bfloat16"
    assert values["block_size"] == values["dflash_config"]["block_size"] == 16
    assert values["dflash_config"]["mask_token_id"] == 151669
    assert values["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert "projector_type" not in values["dflash_config"]
    assert values["num_target_layers"] == 36
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e6
    assert values["rope_scaling"] is None
    assert values["is_neox_style"] is True
    assert values["layer_types"] == ["full_attention"] * 5
    assert values["sliding_window"] is None
    assert values["use_sliding_window"] is False
    assert values["max_window_layers"] == 5
    assert values["rms_norm_eps"] == 1e-6
    assert values["tie_word_embeddings"] is False


def test_what_other_kinds_add() -> None:
    values = to_config_json(SLIDING, torch.float32)
    assert values["layer_types"] == ["sliding_attention", "full_attention"]
    assert values["sliding_window"] == 5
    assert values["use_sliding_window"] is True  # else transformers forgets the window
    assert values["dflash_config"]["input_embedding_scale"] == 1.5
    assert values["dflash_config"]["final_logit_softcapping"] == 3.0

    values = to_config_json(DOMINO, torch.float32)
    assert values["architectures"] == ["DFlashDraftModel"]
    own = {name: values["dflash_config"][name] for name in DOMINO_KEYS}
    assert own == DOMINO_KEYS | {"emb_dim": 10, "gru_hidden_dim": 12}

    values = to_config_json(DSPARK, torch.float32)
    assert values["architectures"] == ["Qwen3DSparkModel"]
    assert "auto_map" not in values
    assert {name: values[name] for name in DSPARK_KEYS} == DSPARK_KEYS | {"markov_rank": 6}
    assert values["target_layer_ids"] == values["dflash_config"]["target_layer_ids"] == [0, 2]
    assert values["mask_token_id"] == values["dflash_config"]["mask_token_id"] == 60
    assert values["block_size"] == 4
    assert values["num_anchors"] >= 1


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-35b-a3b", "qwen3.5-27b"])
def test_presets_come_back_as_they_went(name: str) -> None:
    config = DFlashConfig.preset(name)
    assert from_config_json(to_config_json(config, torch.float32)) == config


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_comes_back_as_it_went(name: str) -> None:
    config = VARIANTS[name]
    returned = from_config_json(to_config_json(config, torch.float32))
    assert type(returned) is type(config)
    assert returned == config


def test_reads_what_other_exporters_write() -> None:
    theirs = replace(CONFIG, pad_token_id=None)  # they leave it out
    assert from_config_json(SPECFORGE) == theirs
    values = to_config_json(CONFIG, torch.float32)
    del values["dflash_config"]["block_size"], values["rope_parameters"]  # the first releases
    assert from_config_json(values) == CONFIG
    values = to_config_json(CONFIG, torch.float32)
    del values["block_size"], values["rope_theta"]  # newer ones
    assert from_config_json(values) == CONFIG
    # The public client takes the default taps where none are named.
    of_8b = {"dflash_config": {"mask_token_id": 151669}}
    assert from_config_json(SPECFORGE | of_8b) == theirs


def test_reads_windows_by_the_rules_of_transformers() -> None:
    windowed = SPECFORGE | {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    }
    assert from_config_json(windowed).windows == (2048,) * 4 + (None,)
    assert from_config_json(SPECFORGE | {"sliding_window": 4096}).windows == (None,) * 5
    derived = {name: value for name, value in windowed.items() if name != "layer_types"}
    found = from_config_json(derived | {"max_window_layers": 3})
    assert found.windows == (None,) * 3 + (2048,) * 2
    assert from_config_json(windowed | {"is_causal": None}).sliding_window == 2048
    every = {"layer_types": ["sliding_attention"] * 5, "is_causal": True}
    assert from_config_json(windowed | every).windows == (2048,) * 5


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DominoDraftModel"])
def test_reads_domino(architecture: str) -> None:
    block = SPECFORGE["dflash_config"] | DOMINO_KEYS
    values = SPECFORGE | {"architectures": [architecture], "emb_dim": 256, "dflash_config": block}
    config = from_config_json(values)
    assert isinstance(config, DominoConfig)
    assert (config.emb_dim, config.gru_hidden_dim) == (256, 1024)
    assert (config.shift_label, config.pure_draft_prefix_len) == (True, 1)
    # What readers take for left out, not what training defaults to.
    for name in ("shift_label", "pure_draft_prefix_len"):
        del block[name]
    config = from_config_json(values)
    assert isinstance(config, DominoConfig)
    assert (config.shift_label, config.pure_draft_prefix_len) == (False, 0)


def test_reads_dspark_wherever_its_keys_lie() -> None:
    taps = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    specforge = SPECFORGE | {"architectures": ["DSparkDraftModel"]}
    projector = {"projector_type": "dspark", "confidence_head_alpha": 1.0}
    without = {name: value for name, value in SPECFORGE.items() if name != "dflash_config"}
    layouts = [
        specforge | {"dflash_config": taps | projector | DSPARK_KEYS},
        # Its newer releases, and DeepSpec's flat one.
        specforge
        | {
            "dflash_config": taps | {"projector_type": "dspark", "attention_mode": "gqa"},
            "dspark_config": DSPARK_KEYS,
            "target_hidden_size": None,
        },
        without | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512} | taps | DSPARK_KEYS,
    ]
    for values in layouts:
        config = from_config_json(values | {"block_size": 7})
        assert isinstance(config, DSparkConfig)
        assert (config.markov_rank, config.markov_head_type) == (256, "vanilla")
        assert config.target_layer_ids == (1, 9, 17, 25, 33)
        assert config.num_proposals == config.block_size == 7


def _block(**values: Any) -> dict[str, Any]:
    return {"dflash_config": SPECFORGE["dflash_config"] | values}


_SLIDES = {
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "sliding_window": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "need a sliding_window of at least 1"),
        ({"layer_types": ["linear_attention"] * 5}, "layer type 'linear_attention' is not known"),
        (_block(is_causal=True), "is_causal True with layers of full_attention"),
        (_SLIDES | {"is_causal": False}, "is_causal False with layers of sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not supported"),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4},
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            },
            "'yarn' is not supported, .* in rope_scaling",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "type": "yarn"}},
            "'yarn' is not supported, .* in rope_scaling",
        ),
        ({"rope_scaling": {"factor": 4}}, "factor 4 is not supported, only 1"),
        ({"rope_scaling": {"rope_theta": 1e4}}, "rope_theta is 1000000, in rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000, in rope_parameters"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters by layer type"),
        ({"rope_theta": None}, "lacks 'rope_theta'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported, only 1"),
        ({"is_neox_style": False}, "is_neox_style False is not supported, only True"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size 32000 is not supported"),
        (_block(output_multiplier=0.2), "output_multiplier 0.2 is not supported"),
        (_block(projector_type="domnio"), "projector_type 'domnio' is not supported"),
        (_block(projector_type="domino"), "lacks 'emb_dim'"),
        (_block(selector_rank=256), r"dflash_config\.selector_rank 256 is not supported"),
        (_block(block_size=8), "block_size is 16, in dflash_config it is 8; make them the same"),
        ({"mask_token_id": 5}, "mask_token_id is 5, in dflash_config it is 151669; make them"),
        (_block(mask_token_id=None), "lacks 'mask_token_id'"),
        (_block(target_layer_ids="all"), "is malformed"),
        ({"architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel'"),
        ({"architectures": ["DSparkDraftModel"]}, "lacks 'markov_rank'"),
        (
            {"architectures": ["Qwen3DSparkModel"]} | _block(**DOMINO_KEYS),
            "are of different kinds of drafters",
        ),
        ({"markov_rank": 256}, "a dflash drafter with markov_rank 256"),
        ({"num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
        ({"num_target_layers": None}, "lacks 'num_target_layers'"),
    ],
)
def test_other_kinds_of_drafters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_config_json(SPECFORGE | change)
    assert "\n" not in str(error.value)


def test_dspark_without_its_confidence_head_is_refused() -> None:
    values = to_config_json(DSPARK, torch.float32) | {"enable_confidence_head": False}
    with pytest.raises(ConfigError, match="enable_confidence_head False is not supported"):
        from_config_json(values)
