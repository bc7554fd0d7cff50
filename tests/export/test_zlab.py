"""The tensor mapping, on numbers that say where they come from."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.export import from_zlab, to_zlab
from megatron_splitkv.export.zlab import megatron_shapes, zlab_shapes
from tests.drafter.harness import TINY as HARNESS_DRAFTER
from tests.export.variants import VARIANTS, assert_same_bytes

# Three groups: a number that no other axis of the fused tensor has.
TINY = replace(HARNESS_DRAFTER, num_attention_heads=6, num_key_value_heads=3)


def random_megatron(
    dtype: torch.dtype = torch.float32, config: DFlashConfig = TINY
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in megatron_shapes(config).items()
    }


def test_key_and_value_rows_are_taken_apart_per_group() -> None:
    tensors = random_megatron()
    # Row r of linear_kv: group, then key or value, then the row of the head.
    heads, width = TINY.num_key_value_heads, TINY.head_dim
    rows = [
        100 * group + 10 * kind + row / width
        for group in range(heads)
        for kind in (1, 2)
        for row in range(width)
    ]
    name = "decoder.layers.1.self_attention.linear_kv.weight"
    tensors[name] = torch.tensor(rows)[:, None].expand(-1, TINY.hidden_size).contiguous()
    zlab = to_zlab(tensors, TINY)
    for kind, projection in ((1, "k_proj"), (2, "v_proj")):
        found = zlab[f"layers.1.self_attn.{projection}.weight"][:, 0].tolist()
        expected = [100 * g + 10 * kind + row / width for g in range(heads) for row in range(width)]
        assert found == pytest.approx(expected)


def test_gate_comes_before_up() -> None:
    tensors = random_megatron()
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    ffn = TINY.ffn_hidden_size
    tensors[name] = torch.arange(2 * ffn)[:, None].expand(-1, TINY.hidden_size).contiguous()
    zlab = to_zlab(tensors, TINY)
    assert zlab["layers.0.mlp.gate_proj.weight"][:, 0].tolist() == list(range(ffn))
    assert zlab["layers.0.mlp.up_proj.weight"][:, 0].tolist() == list(range(ffn, 2 * ffn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_byte_identical(name: str, dtype: torch.dtype) -> None:
    config = replace(VARIANTS[name], num_attention_heads=6, num_key_value_heads=3)
    original = random_megatron(dtype, config)
    zlab = to_zlab(original, config)
    returned = from_zlab(zlab, config)
    assert list(returned) == list(original)
    assert_same_bytes(returned, original)
    assert config.head_shapes().keys() <= zlab.keys()
    for head in config.head_shapes():
        assert torch.equal(zlab[head], original[head])


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_of_every_kind_hold_its_parameters(name: str) -> None:
    config = VARIANTS[name]
    for shapes in (zlab_shapes(config), megatron_shapes(config)):
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == (
            config.num_parameters()
        )


def test_shapes_hold_every_trained_parameter() -> None:
    for name in ("qwen3-8b", "qwen3.5-35b-a3b", "qwen3.5-27b"):
        config = DFlashConfig.preset(name)
        for shapes in (zlab_shapes(config), megatron_shapes(config)):
            total = sum(torch.Size(shape).numel() for shape in shapes.values())
            assert total == config.num_parameters()


def test_tensors_of_another_model_are_refused_by_name() -> None:
    tensors = random_megatron()
    missing = {k: v for k, v in tensors.items() if k != "hidden_norm.weight"}
    with pytest.raises(ConfigError, match=r"lacks hidden_norm\.weight"):
        to_zlab(missing, TINY)
    with pytest.raises(ConfigError, match=r"holds output_layer\.weight, which no drafter"):
        to_zlab(tensors | {"output_layer.weight": torch.zeros(1)}, TINY)
    with pytest.raises(ConfigError, match=r"fc\.weight of shape \(32, 63\).* asks for \(32, 64\)"):
        to_zlab(tensors | {"fc.weight": torch.zeros(32, 63)}, TINY)
    zlab = to_zlab(tensors, TINY)
    with pytest.raises(ConfigError, match=r"z-lab checkpoint holds layers\.0\.self_attn\.q_proj"):
        from_zlab(zlab | {"layers.0.self_attn.q_proj.bias": torch.zeros(1)}, TINY)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_models_are_refused(wrapper: str) -> None:
    tensors = to_zlab(random_megatron(), TINY)
    wrapped = {wrapper + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=f"{wrapper}fc.weight, saved from inside a wrapper"):
        from_zlab(wrapped, TINY)
    one = tensors | {"layers.0._orig_mod.mlp.up_proj.weight": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"layers\.0\._orig_mod\.mlp\.up_proj\.weight, saved"):
        from_zlab(one, TINY)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("domino", "embed_proj.2.weight"), ("dspark", "markov_head.markov_w2.weight")],
)
def test_padded_vocabulary_rows_are_refused(kind: str, name: str) -> None:
    config = VARIANTS[kind]
    tensors = to_zlab(random_megatron(config=config), config)
    padded = torch.cat([tensors[name], torch.zeros(3, tensors[name].shape[1])])
    with pytest.raises(ConfigError, match=rf"{name} of shape \(64, .*: is its vocabulary padded"):
        from_zlab(tensors | {name: padded}, config)


def test_a_head_without_its_configuration_is_refused() -> None:
    domino = to_zlab(random_megatron(config=VARIANTS["domino"]), VARIANTS["domino"])
    with pytest.raises(ConfigError, match=r"holds embed_proj\.0\.weight, .*, which no drafter"):
        from_zlab(domino, VARIANTS["dflash"])
    with pytest.raises(ConfigError, match=r"lacks confidence_head\.proj\.bias, "):
        from_zlab(domino, VARIANTS["dspark"])
