"""config.json: every key that some reader looks for, and the way back."""

from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.export.config_json import from_config_json, to_config_json

CONFIG = DFlashConfig.preset("qwen3-8b")


def test_every_public_key_is_there() -> None:
    values = to_config_json(CONFIG, torch.bfloat16)
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert values["model_type"] == "qwen3"
    assert values["dtype"] == "bfloat16"
    assert values["block_size"] == values["dflash_config"]["block_size"] == 16
    assert values["dflash_config"]["mask_token_id"] == 151669
    assert values["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
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


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-35b-a3b", "qwen3.5-27b"])
def test_comes_back_as_it_went(name: str) -> None:
    config = DFlashConfig.preset(name)
    assert from_config_json(to_config_json(config, torch.float32)) == config


def test_reads_what_other_exporters_write() -> None:
    values = to_config_json(CONFIG, torch.float32)
    del values["dflash_config"]["block_size"], values["rope_parameters"]  # the first releases
    assert from_config_json(values) == CONFIG
    values = to_config_json(CONFIG, torch.float32)
    del values["block_size"], values["rope_theta"]  # newer ones
    assert from_config_json(values) == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention are not supported"),
        ({"dflash_config": {"is_causal": True}}, "causal are not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
        ({"dflash_config": {}}, "lacks 'target_layer_ids'"),
    ],
)
def test_other_kinds_of_drafters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config_json(to_config_json(CONFIG, torch.float32) | change)
