"""What a Megatron target refuses, and which tensors it reads; states are tested on ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_splitkv.config import ConfigError
from megatron_splitkv.online.gpt_from_hf import check_gpt_from_hf
from megatron_splitkv.online.hf_weights import HFWeights, Recipe, recipes
from megatron_splitkv.online.megatron_target import MegatronTarget
from tests.online.tiny_folders import TARGETS, random_target, save_target

# Configurations and weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    save_target("qwen3", made)
    return made


def _with_config(folder: Path, new: Path, **changes: Any) -> Path:
    """A folder that has only the changed configuration."""
    config = json.loads((folder / "config.json").read_text())
    new.mkdir(exist_ok=True)
    (new / "config.json").write_text(json.dumps({**config, **changes}))
    return new


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_family_is_taken(folder: Path, tp_size: int, tmp_path: Path) -> None:
    for name in TARGETS:
        random_target(name).config.save_pretrained(tmp_path)
        check_gpt_from_hf(tmp_path, tp_size=tp_size)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, "the family 'gemma'"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        (
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "sliding layers",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE of type 'dynamic' on 100% of a head's width",
        ),
    ],
)
def test_other_targets_are_refused(
    folder: Path, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_gpt_from_hf(_with_config(folder, tmp_path, **changes))
    assert str(caught.value) == (
        f"target {tmp_path} has {named}; --online-target-backend megatron runs dense llama, qwen2, "
        "qwen3 with full attention: use --online-target-backend hf"
    )


def test_unsplittable_heads_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 key/value heads cannot be split over a"):
        check_gpt_from_hf(folder, tp_size=4)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a Hugging Face folder: it has no config\.json"):
        check_gpt_from_hf(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--transformer-impl 'apex' is not known"):
        check_gpt_from_hf(tmp_path, backend="apex")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_recipes_take_every_tensor_once(name: str) -> None:
    model = random_target(name)
    taken = [x for _, r in recipes(model.config, fused_norms=False) for x in r.names]
    tied = "lm_head.weight"
    assert sorted([*taken, tied]) == sorted(model.state_dict().keys() | {tied})
    assert len(set(taken)) == len(taken)


def test_fused_norms_have_the_names_that_megatron_maps_to() -> None:
    """Megatron's own table from its local names to those of Transformer Engine's modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    table = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert len(table) == 2
    config = random_target("qwen2").config
    separate = dict(recipes(config, fused_norms=False))
    fused = dict(recipes(config, fused_norms=True))
    renamed = {}
    for name, recipe in separate.items():
        for ours, theirs in table.items():
            name = name.replace(ours, theirs)
        renamed[name] = recipe
    assert fused == renamed
    assert fused.keys() != separate.keys()


def test_parts_are_fused_group_by_group() -> None:
    q, k = torch.arange(8), torch.arange(100, 104)
    by_group = Recipe(("q", "k"), 0, groups=4).fuse([q, k], tp_size=2)
    assert by_group.tolist() == [0, 1, 2, 3, 100, 101, 4, 5, 6, 7, 102, 103]
    assert Recipe(("a", "b"), 0).fuse([q, k], tp_size=2).tolist() == [*q.tolist(), *k.tolist()]


class _Rows(torch.nn.Module):
    """One parameter by the name of the embedding."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Module()
        self.embedding.word_embeddings = torch.nn.Embedding(rows, width)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_vocabulary_is_padded_with_zeros(folder: Path, tp_size: int, monkeypatch: Any) -> None:
    whole = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = -(-len(whole) // tp_size)
    name, recipe = next(recipes(random_target("qwen3").config, fused_norms=False))
    monkeypatch.setattr(
        "megatron_splitkv.online.hf_weights.recipes", lambda *_, **__: [(name, recipe)]
    )
    parts = []
    for rank in range(tp_size):
        model = _Rows(rows, whole.shape[1])
        HFWeights(folder).load(model, None, fused_norms=False, tp_rank=rank, tp_size=tp_size)
        parts.append(model.embedding.word_embeddings.weight.detach())
    joined = torch.cat(parts)
    assert torch.equal(joined[: len(whole)], whole)
    assert not joined[len(whole) :].any()


def test_broken_weight_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors and no model"):
        HFWeights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="has no weight_map of names and files"):
        HFWeights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        HFWeights(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    config = random_target("qwen3").config
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    model = _Rows(61, 32)
    with pytest.raises(ConfigError, match=r"has no tensor model\.embed_tokens\.weight"):
        HFWeights(tmp_path).load(model, config, fused_norms=False, tp_rank=0, tp_size=1)
    save_file(
        {"model.embed_tokens.weight": embedding[:, :8].contiguous()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"embed_tokens.* \(\(61, 8\) a rank, not \(61, 32\)\)"):
        HFWeights(tmp_path).load(model, config, fused_norms=False, tp_rank=0, tp_size=1)


# The target, around a model that never runs


def _model(**changes: Any) -> Any:
    config = {
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "hidden_size": 8,
    }
    model = torch.nn.Module()
    model.config = SimpleNamespace(**{**config, **changes})
    model.position_embedding_type = changes.get("position_embedding_type", "rope")
    model.embedding = _Rows(5, 8).embedding
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    model.decoder.final_layernorm = changes.get("final_layernorm", torch.nn.RMSNorm(8))
    return model


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2, it must be 1"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2, it must be 1"),
        ({"sequence_parallel": True}, "sequence_parallel is True, it must be False"),
        (
            {"position_embedding_type": "yarn"},
            "position_embedding_type is 'yarn', it must be 'rope'",
        ),
        ({"final_layernorm": None}, "without a final norm has no final hidden states"),
    ],
)
def test_models_that_cannot_be_driven(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MegatronTarget(_model(**changes), [0], None, final_hidden=True)


def test_taps_must_exist() -> None:
    with pytest.raises(ConfigError, match="target layer 3 does not exist"):
        MegatronTarget(_model(), [0, 3], None)


def test_the_model_is_frozen() -> None:
    model = _model()
    MegatronTarget(model, [0, 2], None)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_source_pads_documents_apart() -> None:
    target = MegatronTarget(_model(), [1], None)
    target.cp_size = 2
    source = target.source(np.array([0, 3, 8]))
    # Documents of 3 and 5 rows are padded to 4 and 8, and cut into chunks of 1 and 2.
    assert source.rows(0).tolist() == [0, -1, 3, 4, -2, -1]
    assert source.rows(1).tolist() == [1, 2, 5, 6, 7, -1]
