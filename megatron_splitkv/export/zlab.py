"""One drafter, two spellings: Megatron's modules and the public z-lab (DFlash) checkpoint.

Megatron fuses what it multiplies together; the public layout keeps every projection by itself:

* ``linear_kv`` holds the rows of each key/value group as ``[k | v]``, so that a tensor-parallel
  shard has whole heads of both; the public layout has ``k_proj`` and ``v_proj``;
* ``linear_fc1`` is ``[gate; up]``; the public layout has ``gate_proj`` and ``up_proj``.

All other tensors only change their names; those that Domino and DSpark add to the backbone have
their public names in both. The two functions are inverses, bit for bit.

Shape legend: C tapped layers, d hidden size, f FFN size, n_q query and n_kv key/value heads, hd
head width.
"""

from collections.abc import Iterator, Mapping

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig

MODEL_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_q.weight": "self_attn.q_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
LINEAR_KV = "self_attention.linear_kv.weight"
KEY_VALUE = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
LINEAR_FC1 = "mlp.linear_fc1.weight"
GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
# Tensors with a row for each token.
_BY_TOKEN = (
    "embed_proj.2.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
)
# What wrappers put before the names of a model that is saved from inside them.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def to_zlab(tensors: Mapping[str, torch.Tensor], config: DFlashConfig) -> dict[str, torch.Tensor]:
    """Rename and unfuse a Megatron drafter.

    Args:
        tensors: the whole (unsharded) model, by Megatron's names, layers one by one.
        config: the drafter.

    Returns:
        Contiguous tensors by the public names, dtypes as they were.

    Raises:
        ConfigError: a tensor is missing, is not the drafter's, or has another shape.
    """
    check_tensors(tensors, megatron_shapes(config), "the Megatron checkpoint")
    groups = (config.num_key_value_heads, 2, config.head_dim, config.hidden_size)
    zlab = {theirs: tensors[ours] for ours, theirs in _renamed(config)}
    for megatron_layer, layer in _layers(config):
        by_group = tensors[megatron_layer + LINEAR_KV].view(groups)
        for kind, name in enumerate(KEY_VALUE):
            zlab[layer + name] = by_group[:, kind].flatten(0, 1)
        halves = tensors[megatron_layer + LINEAR_FC1].chunk(2)
        zlab.update(zip((layer + name for name in GATE_UP), halves, strict=True))
    return {name: zlab[name].contiguous() for name in zlab_shapes(config)}


def from_zlab(tensors: Mapping[str, torch.Tensor], config: DFlashConfig) -> dict[str, torch.Tensor]:
    """Inverse of `to_zlab`.

    Args:
        tensors: a public checkpoint.
        config: the drafter.

    Raises:
        ConfigError: as in `to_zlab`.
    """
    check_tensors(tensors, zlab_shapes(config), "the z-lab checkpoint")
    per_group = (config.num_key_value_heads, config.head_dim, config.hidden_size)
    megatron = {ours: tensors[theirs] for ours, theirs in _renamed(config)}
    for megatron_layer, layer in _layers(config):
        key, value = (tensors[layer + name].view(per_group) for name in KEY_VALUE)
        megatron[megatron_layer + LINEAR_KV] = torch.stack([key, value], dim=1).flatten(0, 2)
        halves = [tensors[layer + name] for name in GATE_UP]
        megatron[megatron_layer + LINEAR_FC1] = torch.cat(halves)
    return {name: megatron[name].contiguous() for name in megatron_shapes(config)}


def megatron_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Whole-tensor shapes by Megatron's names."""
    zlab = zlab_shapes(config)
    shapes = {ours: zlab[theirs] for ours, theirs in _renamed(config)}
    kv_rows = 2 * config.num_key_value_heads * config.head_dim
    for layer, _ in _layers(config):
        shapes[layer + LINEAR_KV] = (kv_rows, config.hidden_size)
        shapes[layer + LINEAR_FC1] = (2 * config.ffn_hidden_size, config.hidden_size)
    return shapes


def zlab_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by the public names, in the order in which they are written."""
    d, ffn, head = config.hidden_size, config.ffn_hidden_size, config.head_dim
    query_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, config.feature_width),
        "hidden_norm.weight": (d,),
    }
    for _, layer in _layers(config):
        shapes |= {
            layer + "input_layernorm.weight": (d,),
            layer + "self_attn.q_proj.weight": (query_rows, d),
            layer + "self_attn.k_proj.weight": (kv_rows, d),
            layer + "self_attn.v_proj.weight": (kv_rows, d),
            layer + "self_attn.o_proj.weight": (d, query_rows),
            layer + "self_attn.q_norm.weight": (head,),
            layer + "self_attn.k_norm.weight": (head,),
            layer + "post_attention_layernorm.weight": (d,),
            layer + "mlp.gate_proj.weight": (ffn, d),
            layer + "mlp.up_proj.weight": (ffn, d),
            layer + "mlp.down_proj.weight": (d, ffn),
        }
    return shapes | {"norm.weight": (d,)} | config.head_shapes()


def check_tensors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse tensors that are not exactly the expected ones.

    Args:
        found: by name.
        expected: shapes by name.
        where: what holds them, for the message.

    Raises:
        ConfigError: naming what is missing, what is unexpected, or what has another shape.
    """
    for name in sorted(found):
        wrapper = next((prefix for prefix in _WRAPPERS if prefix in name), None)
        if wrapper is not None:
            raise ConfigError(
                f"{where} holds {name}, saved from inside a wrapper ({wrapper}); save the model "
                "in it"
            )
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing:
        raise ConfigError(f"{where} lacks {_listed(missing)}; is it of this drafter?")
    if unexpected:
        raise ConfigError(
            f"{where} holds {_listed(unexpected)}, which no drafter of this configuration has; is "
            "it of this drafter?"
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            padded = found[name].dim() == len(shape) and found[name].shape[0] > shape[0]
            hint = ": is its vocabulary padded?" if padded and name in _BY_TOKEN else ""
            raise ConfigError(
                f"{where} has {name} of shape {tuple(found[name].shape)}, the configuration asks "
                f"for {shape}{hint}"
            )


def _layers(config: DFlashConfig) -> Iterator[tuple[str, str]]:
    """Name prefixes of every layer: Megatron's, the public one."""
    for i in range(config.num_layers):
        yield f"decoder.layers.{i}.", f"layers.{i}."


def _renamed(config: DFlashConfig) -> Iterator[tuple[str, str]]:
    """Names of the tensors that are the same in both layouts: Megatron's, the public one."""
    yield from MODEL_NAMES.items()
    for name in config.head_shapes():
        yield name, name
    for megatron_layer, layer in _layers(config):
        for ours, theirs in LAYER_NAMES.items():
            yield megatron_layer + ours, layer + theirs


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:8]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
