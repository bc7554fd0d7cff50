"""Targets are loaded whole and frozen, nested ones too, and say what a store needs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import (
    describe_target,
    load_target,
    load_target_config,
    load_tokenizer,
    target_checksum,
    target_name,
)
from megatron_splitkv.data.target_speech import respond
from megatron_splitkv.data.target_states import check_final_hidden, document_states
from tests.data.targets import random_documents, random_target

NESTED = ["nested-gemma3", "nested-llava", "nested-qwen3_5"]


@pytest.fixture(scope="module")
def model(target_folder: Path) -> Any:
    return load_target(target_folder)


@pytest.fixture(scope="module", params=NESTED)
def nested(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model that was saved, the folder, and the model that was loaded from there."""
    saved = random_target(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    saved.save_pretrained(folder)
    return saved, folder, load_target(folder)


def test_a_target_is_loaded_frozen_and_in_eval_mode(model: Any) -> None:
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_describe_target_names_what_a_store_needs(model: Any, target_folder: Path) -> None:
    info = describe_target(model, target_folder, "tiny", 257)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (5, 32, 258)
    assert (info.eos_token_ids, info.pad_token_id) == ((256,), None)
    assert info.checksum == target_checksum(target_folder)


def test_the_configuration_is_read_without_weights(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    assert load_target_config(tmp_path).get_text_config().num_hidden_layers == 5


def test_checksum_follows_the_weights(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    content = bytearray((target_folder / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    assert target_checksum(tmp_path) == target_checksum(target_folder)
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert target_checksum(tmp_path) != target_checksum(target_folder)
    with pytest.raises(ConfigError, match="no weight files"):
        target_checksum(tmp_path / "nowhere")


def test_checksum_follows_what_the_configuration_computes(
    target_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(target_folder / "model.safetensors")
    config = json.loads((target_folder / "config.json").read_text())

    def checksum(**changes: Any) -> str:
        content = config | {"text_config": {"rms_norm_eps": 1e-6, "dtype": "float32"}} | changes
        (tmp_path / "config.json").write_text(json.dumps(dict(reversed(content.items()))))
        return target_checksum(tmp_path)

    whole = checksum()
    nested = {"dtype": "float32", "rms_norm_eps": 1e-6, "use_cache": False}
    saved_anew = {"transformers_version": "9", "use_cache": False, "_name_or_path": "/there"}
    assert checksum(**saved_anew, text_config=nested) == whole
    others = {
        checksum(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        checksum(rms_norm_eps=0.5),
        checksum(text_config=nested | {"rms_norm_eps": 1e-5}),
        checksum(dtype="bfloat16"),  # what the weights are loaded in
    }
    assert len(others | {whole}) == 5
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Expecting"):
        target_checksum(tmp_path)


def test_a_folder_of_the_cache_is_named_by_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "models--microsoft--Phi-3-mini" / "snapshots"
    (snapshots / "0a67").mkdir(parents=True)
    assert target_name(snapshots / "0a67") == "microsoft/Phi-3-mini@0a67"
    monkeypatch.chdir(snapshots / "0a67")
    assert target_name(".") == "microsoft/Phi-3-mini@0a67"
    assert target_name("/models--gpt2/snapshots/f00") == "gpt2@f00"
    assert target_name("models/Qwen3-8B") == "Qwen3-8B"
    assert target_name("snapshots/0a67/") == "0a67"


def test_a_nested_text_model_is_read_as_the_whole_reads_text(nested: Any) -> None:
    saved, _, loaded = nested
    documents = random_documents([9, 21, 3])
    pieces = {piece.document: piece for piece in document_states(loaded, documents, (0, 2, 3))}
    check_final_hidden(loaded)
    for i, ids in enumerate(documents):
        with torch.no_grad():
            whole = saved(input_ids=ids[None], output_hidden_states=True)
        # The last of transformers' hidden states is normed: tap the others.
        expected = torch.cat([whole.hidden_states[k + 1][0] for k in (0, 2)], dim=-1)
        torch.testing.assert_close(pieces[i].features[:, :64], expected, rtol=1e-5, atol=1e-5)
        said = loaded.get_output_embeddings()(pieces[i].final_hidden)
        torch.testing.assert_close(said, whole.logits[0], rtol=1e-5, atol=1e-5)


def test_a_nested_target_is_described_by_its_text_model(nested: Any) -> None:
    _, folder, loaded = nested
    info = describe_target(loaded, folder, "nested", 63)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (4, 32, 64)
    assert info.eos_token_ids == (2,)


def test_a_nested_target_speaks(nested: Any) -> None:
    saved, _, loaded = nested
    prompts = random_documents([5, 11])
    for prompt, response in zip(prompts, respond(loaded, prompts, 6, batch_size=2), strict=True):
        ids = prompt
        for _ in range(6):
            with torch.no_grad():
                ids = torch.cat([ids, saved(input_ids=ids[None]).logits[0, -1].argmax()[None]])
        assert response.tolist() == ids[len(prompt) :].tolist()


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    random_target("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 of its weights, model\.layers\.2\.mlp\.up_proj"
    ):
        load_target(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_target(tmp_path)


def test_dtype_is_as_saved_or_as_asked(tmp_path: Path) -> None:
    random_target("llama").bfloat16().save_pretrained(tmp_path)
    assert load_target(tmp_path).dtype == torch.bfloat16
    assert load_target(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_folder_that_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json$"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        load_target(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_a_model_of_something_else_than_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="no language model for ViTConfig"):
        load_target(tmp_path)


def test_reading_a_store_needs_no_transformers() -> None:
    code = (
        "import sys; import megatron_splitkv.data.packing, megatron_splitkv.data.target_states, "
        "megatron_splitkv.data.target_speech; sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_target_is_loaded_to_a_device(tmp_path: Path) -> None:
    random_target("llama").save_pretrained(tmp_path)
    model = load_target(tmp_path, device="cuda")
    assert isinstance(model, LlamaForCausalLM)
    assert {p.device.type for p in model.parameters()} == {"cuda"}


def test_a_model_without_language_is_refused_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="no language model for ViTConfig"):
        load_target_config(tmp_path)
