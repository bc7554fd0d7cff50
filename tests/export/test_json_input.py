"""What other programs wrote is refused in one line where a reader could not look at it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.export.config_json import to_config_json
from megatron_splitkv.export.folder import read_config, read_drafter
from megatron_splitkv.export.json_input import check_types
from megatron_splitkv.export.speculators_json import to_speculators_json
from tests.export.variants import PLAIN

ZLAB = to_config_json(PLAIN, torch.float32)
SPECULATORS = to_speculators_json(PLAIN, torch.float32, target=None)
_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}


def _refusal(folder: Path, content: str) -> str:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        read_config(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": 1}, "architectures is 1, it must be a list of strings"),
        ({"architectures": [[]]}, "architectures is [[]], it must be"),
        ({"dflash_config": [1]}, "dflash_config is [1], it must be an object"),
        ({"dflash_config": "x"}, "dflash_config is 'x', it must be an object"),
        ({"projector_type": []}, "projector_type is [], it must be a string"),
        ({"dflash_config": {"block_size": "4"}}, "dflash_config.block_size is '4', it must be an"),
        ({"rope_theta": "x"}, "rope_theta is 'x', it must be a finite number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, it must be a finite number"),
        ({"rope_theta": 10**400}, "it must be a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], it must be an object"),
        ({"rope_parameters": {"rope_theta": []}}, "rope_parameters.rope_theta is [], it must be"),
        ({"layer_types": 1}, "layer_types is 1, it must be a list of strings"),
        (_WINDOW | {"max_window_layers": None}, "lacks 'max_window_layers'"),
        (_WINDOW | {"max_window_layers": "1"}, "max_window_layers is '1', it must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, it must be an integer"),
        ({"eos_token_id": {}}, "eos_token_id is {}, it must be an integer or a list of them"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', it must be an integer or a list of them"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id is [1, 'x'], it must be"),
    ],
)
def test_keys_of_wrong_types_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert message in _refusal(tmp_path, json.dumps(ZLAB | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": []}, "speculators_model_type is [], it must be a string"),
        ({"speculators_config": [1]}, "speculators_config is [1], it must be an object"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config is [1], it must be"),
        (
            {"transformer_layer_config": {"rope_scaling": 1}},
            "transformer_layer_config.rope_scaling is 1, it must be an object",
        ),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": "3"}]}},
            "speculators_config.proposal_methods.speculative_tokens is '3', it must be",
        ),
        (
            {"speculators_config": {"verifier": {"name_or_path": 1}}},
            "speculators_config.verifier.name_or_path is 1, it must be a string",
        ),
    ],
)
def test_keys_of_the_speculators_layout_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert message in _refusal(tmp_path, json.dumps(SPECULATORS | change))


@pytest.mark.parametrize("content", ["[1]", '{"text_config": [1], "num_hidden_layers": "x"}'])
def test_an_odd_target_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(content)
    verifier = {"verifier": {"name_or_path": str(tmp_path / "target")}}
    values = SPECULATORS | {"num_target_layers": None, "speculators_config": verifier}
    assert "does not say how many layers" in _refusal(tmp_path, json.dumps(values))


def test_depth_has_an_end(tmp_path: Path) -> None:
    assert "config.json is nested too deeply" in _refusal(tmp_path, "[" * 100_000)
    # What the parser takes may still be too deep for those who look at it.
    deep = '{"dflash_config":' * 900 + "{}" + "}" * 900
    assert _refusal(tmp_path, deep)


def test_an_index_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    for content in ("[1]", "[" * 100_000):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is n") as error:
            read_drafter(tmp_path)
        assert "\n" not in str(error.value)


def test_what_we_write_passes() -> None:
    check_types(ZLAB)
    check_types(SPECULATORS)
