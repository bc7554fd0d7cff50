"""A target in a GGUF file is the dense model that its blocks stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data import target as target_module
from megatron_splitkv.data.gguf import unpack_gguf
from megatron_splitkv.data.shard import file_sha256
from megatron_splitkv.data.target import (
    describe_target,
    load_target,
    load_target_config,
    load_tokenizer,
    target_checksum,
)
from megatron_splitkv.data.target_states import document_states
from tests.data.targets import random_documents

gguf = pytest.importorskip("gguf", reason="needs gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _tensor_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A GGUF file with matrices in blocks of 8 bits, and the dense model of the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    file = tmp_path_factory.mktemp("gguf") / "tiny-q8.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(4)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefgh", "ab", *(f"<{i}>" for i in range(55))])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(62)
    writer.add_eos_token_id(63)
    blocks = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.state_dict().items():
        if weight.dim() == 1:
            writer.add_tensor(_tensor_name(name), weight.numpy())
            continue
        packed = gguf.quants.quantize(weight.numpy(), blocks)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, blocks)))
        writer.add_tensor(_tensor_name(name), packed, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, model


def test_features_are_those_of_the_dense_model(quantised: tuple[Path, Any]) -> None:
    file, dense = quantised
    model, documents = load_target(file), random_documents([9, 20])
    assert model.dtype == torch.float32
    for got, expected in zip(
        document_states(model, documents, (0, 3)),
        document_states(dense, documents, (0, 3)),
        strict=True,
    ):
        assert torch.equal(got.features, expected.features)
        assert torch.equal(got.final_hidden, expected.final_hidden)
    assert load_target(file, torch.bfloat16).dtype == torch.bfloat16


def test_a_file_is_described_like_a_folder(quantised: tuple[Path, Any]) -> None:
    file, _ = quantised
    info = describe_target(load_target(file), file, "tiny", 61)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (4, 32, 64)
    assert info.eos_token_ids == (63,)
    assert info.checksum == target_checksum(file) == file_sha256(file)
    assert load_target_config(file).num_hidden_layers == 4
    assert load_tokenizer(file)("abcab")["input_ids"] == [8, 2, 8]


def test_unpacked_folder_holds_the_same_model(quantised: tuple[Path, Any], tmp_path: Path) -> None:
    file, dense = quantised
    unpack_gguf(file, tmp_path / "new" / "target")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["target"]
    model = load_target(tmp_path / "new" / "target")
    for name, weight in dense.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    config = json.loads((tmp_path / "new" / "target" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert "quantization_config" not in config
    assert load_tokenizer(tmp_path / "new" / "target")("abcab")["input_ids"] == [8, 2, 8]


def test_bad_files_are_one_clear_line(
    quantised: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = quantised
    with pytest.raises(ConfigError, match=r"none\.gguf does not exist"):
        load_target(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"no config\.json; name one of its \.gguf files"):
        load_target(file.parent)
    (tmp_path / "text.gguf").write_text("no such thing")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:20_000])
    for name in ("text", "cut"):
        with pytest.raises(ConfigError, match="cannot be loaded") as error:
            load_target(tmp_path / f"{name}.gguf")
        assert "\n" not in str(error.value)
    monkeypatch.setattr(target_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="a GGUF target needs gguf; install"):
        load_tokenizer(file)
