"""What a configuration says of its RoPE, and which lengths it lets a target read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.rope import (
    check_answer_length,
    check_document_length,
    longest_document,
    rope_switches,
    rope_types,
)
from tests.data.targets import GPT2, TEXT, longrope_config


def _layered(**types: Any) -> Any:
    """A text model of several types of layers, nested in a multimodal one."""
    text = SimpleNamespace(max_position_embeddings=512, rope_parameters=types)
    return SimpleNamespace(get_text_config=lambda decoder: text)


def test_rope_is_read_wherever_it_is_written() -> None:
    assert rope_types(longrope_config()) == {"longrope"}
    assert rope_types(transformers.LlamaConfig(**TEXT)) == {"default"}
    assert rope_types(transformers.GPT2Config(**GPT2)) == frozenset()
    assert rope_types(transformers.Gemma3TextConfig(**TEXT)) == {"default"}
    long = {"type": "longrope", "original_max_position_embeddings": 64}
    layered = _layered(full=long, other={"rope_type": "longrope"}, sliding={"rope_theta": 1e4})
    assert rope_types(layered) == {"longrope", "default"}
    assert rope_switches(layered) == (64, 512)
    assert rope_switches(longrope_config()) == (64,)
    assert rope_switches(transformers.LlamaConfig(**TEXT)) == ()


def test_what_a_file_says_is_read(tmp_path: Path) -> None:
    content = longrope_config().to_dict()
    content["rope_scaling"] = content.pop("rope_parameters")  # as transformers 4 wrote it
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert rope_switches(config) == (64,)


def test_longer_documents_have_to_be_read_whole() -> None:
    config = longrope_config()
    assert longest_document(config, 17) == 64
    assert longest_document(config, 131) == 131
    assert longest_document(transformers.LlamaConfig(**TEXT), 17) is None
    check_document_length(config, 64, 17)
    check_document_length(config, 131, 131)
    with pytest.raises(ConfigError) as error:
        check_document_length(config, 131, 17)
    assert str(error.value) == (
        "the target's RoPE (longrope) changes above 64 tokens, and documents of up to 131 do not "
        "fit into --batch-tokens 17 to be read whole; give --batch-tokens 131, or cut with "
        "--sequence-length 64"
    )


def test_answers_do_not_cross_a_change() -> None:
    check_answer_length(longrope_config(), 54, 10)
    check_answer_length(transformers.LlamaConfig(**TEXT), 4096, 1024)
    with pytest.raises(ConfigError, match="give at most 64 in both together"):
        check_answer_length(longrope_config(), 55, 10)


def test_rope_with_a_memory_is_refused_and_what_to_do_instead_is_the_same() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    dynamic, default = (
        transformers.LlamaConfig(**TEXT, rope_parameters=rope, max_position_embeddings=64)
        for rope in (plain | {"rope_type": "dynamic", "factor": 4.0}, plain)
    )
    for check in (rope_switches, lambda config: check_document_length(config, 3, 4096)):
        with pytest.raises(
            ConfigError, match=r"'dynamic' depends on what .* up to 64 tokens .* 'default' in its"
        ):
            check(dynamic)
    found = []
    for config in (dynamic, default):
        torch.manual_seed(0)
        model = transformers.LlamaModel(config).eval()
        found.append(model(torch.arange(64)[None]).last_hidden_state)
    assert torch.equal(*found)
