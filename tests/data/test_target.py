"""Taps are the layers' outputs, and batching changes neither features nor responses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import (
    decoder_layers,
    describe_target,
    document_features,
    greedy_responses,
    load_target,
    load_tokenizer,
    tapped_layers,
    target_checksum,
)


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return load_target(target_folder)


def _prompts(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(256, (n,), generator=generator) for n in lengths]


def test_a_target_is_loaded_frozen_and_in_eval_mode(model: Any) -> None:
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_taps_are_zero_based_layer_outputs(model: Any) -> None:
    (ids,) = _prompts([20])
    with tapped_layers(model, (0, 1, 3)) as collect, torch.no_grad():
        hidden = model(ids[None], output_hidden_states=True).hidden_states
        features = collect()
    expected = torch.cat([hidden[i + 1] for i in (0, 1, 3)], dim=-1)
    assert torch.equal(features, expected)
    # The neighbouring convention (0 = embedding) is another tensor.
    wrong = torch.cat([hidden[i] for i in (0, 1, 3)], dim=-1)
    assert not torch.allclose(features, wrong, atol=0.1)


def test_hooks_are_gone_afterwards_even_after_an_error(model: Any) -> None:
    layer = decoder_layers(model)[1]
    before = len(layer._forward_hooks)  # Transformers may have its own.

    def fail() -> None:
        with tapped_layers(model, (1,)):
            assert len(layer._forward_hooks) == before + 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(layer._forward_hooks) == before


def test_tap_that_the_target_does_not_have_is_refused(model: Any) -> None:
    with (
        pytest.raises(ConfigError, match="layer 5 does not exist: the target has 5 layers"),
        tapped_layers(model, (1, 5)),
    ):
        pass


def test_features_of_a_padded_batch_are_those_of_each_document_alone(model: Any) -> None:
    documents = _prompts([9, 33, 1, 17, 33, 2])
    told: list[tuple[int, int]] = []
    batched = dict(
        document_features(
            model,
            documents,
            (1, 2),
            batch_tokens=66,
            progress=lambda done, total: told.append((done, total)),
        )
    )
    assert sorted(batched) == list(range(6))
    assert told[-1] == (95, 95)
    assert len(told) == 3
    for i, document in enumerate(documents):
        ((_, alone),) = document_features(model, [document], (1, 2))
        assert batched[i].shape == (len(document), 64)
        torch.testing.assert_close(batched[i], alone, rtol=1e-4, atol=1e-4)


def test_greedy_responses_equal_plain_greedy_decoding(model: Any) -> None:
    prompts = _prompts([5, 12, 3, 8, 12])
    responses = greedy_responses(model, prompts, 10, batch_size=3)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = prompt
        for _ in range(10):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        assert response.tolist() == ids[len(prompt) :].tolist()


def test_a_response_ends_with_its_stop_token(model: Any) -> None:
    prompts = _prompts([5, 12, 3])
    whole = greedy_responses(model, prompts, 12, batch_size=3)
    stop = int(whole[0][4])
    stopped = greedy_responses(model, prompts, 12, batch_size=3, stop_token_ids=[stop])
    for full, cut in zip(whole, stopped, strict=True):
        full = full.tolist()
        expected = full[: full.index(stop) + 1] if stop in full else full
        assert cut.tolist() == expected
    assert len(stopped[0]) <= 5


def test_describe_target_names_what_a_store_needs(model: Any, target_folder: Path) -> None:
    info = describe_target(model, target_folder, "tiny", 257)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (5, 32, 258)
    assert (info.eos_token_ids, info.pad_token_id) == ((256,), None)
    assert info.checksum == target_checksum(target_folder)


def test_checksum_follows_the_weights(target_folder: Path, tmp_path: Path) -> None:
    content = bytearray((target_folder / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    assert target_checksum(tmp_path) == target_checksum(target_folder)
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert target_checksum(tmp_path) != target_checksum(target_folder)
    with pytest.raises(ConfigError, match="no weight files"):
        target_checksum(tmp_path / "nowhere")


def test_llama_layers_are_found(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_target(tmp_path, dtype=torch.bfloat16)
    assert len(decoder_layers(model)) == 3
    ((_, features),) = document_features(model, [torch.arange(5)], (0, 2))
    assert features.dtype == torch.bfloat16
    assert features.shape == (5, 32)


def test_folder_that_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        load_target(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_reading_a_store_needs_no_transformers() -> None:
    code = (
        "import sys; import megatron_splitkv.data.packing, megatron_splitkv.data.target; "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
