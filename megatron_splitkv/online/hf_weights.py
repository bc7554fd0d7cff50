"""One dense decoder, two spellings: the weights of a Hugging Face folder for Megatron's GPT.

Megatron fuses what it multiplies together; the public layout keeps every projection by itself:

* ``linear_qkv`` holds the rows of each key/value group as ``[its queries | k | v]``, so that a
  tensor-parallel shard has whole groups; the public layout has ``q_proj``, ``k_proj``, ``v_proj``;
* ``linear_fc1`` is ``[gate; up]`` of the shard; the public layout has ``gate_proj``, ``up_proj``.

Every public matrix is cut evenly, and what is fused are the cuts. So a rank reads its own part of
the files and no more, whatever the tensor-parallel size.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from megatron_splitkv.config import ConfigError

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"

_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class Recipe:
    """How a rank's part of a Megatron tensor is made of its parts of public tensors.

    Args:
        names: of the public tensors, in the order in which they are fused.
        axis: along which tensor parallelism cuts them; None: every rank has them whole.
        groups: over all ranks: the parts are fused group by group, 1 / groups of each at a time.
            Without groups one part comes after the other.
    """

    names: tuple[str, ...]
    axis: int | None = None
    groups: int | None = None

    def fuse(self, parts: list[torch.Tensor], tp_size: int) -> torch.Tensor:
        """Join a rank's parts.

        Args:
            parts: cut along `axis`, in the order of `names`.
            tp_size: how many ranks share the tensors.

        Shape:
            ``[rows_i, ...]`` -> ``[sum of rows_i, ...]``; local.
        """
        groups = 1 if self.groups is None else self.groups // tp_size
        return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], dim=1).flatten(0, 1)


def recipes(config: Any, *, fused_norms: bool) -> Iterator[tuple[str, Recipe]]:
    """Every parameter of the GPT without an output layer.

    Args:
        config: of transformers; a llama, qwen2 or qwen3.
        fused_norms: a layer's norms are in the linears behind them, as Transformer Engine has it.

    Yields:
        (name in Megatron's GPT, recipe), layers in order.

    Source:
        `SelfAttention.get_query_key_value_tensors` of Megatron for the order of ``linear_qkv``;
        `MLP.forward` for that of ``linear_fc1``.
    """
    yield "embedding.word_embeddings.weight", Recipe((_EMBEDDING,), _ROWS)
    for i in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
        yield (
            f"{attention}linear_qkv.layer_norm_weight"
            if fused_norms
            else f"{ours}input_layernorm.weight",
            Recipe((f"{theirs}input_layernorm.weight",)),
        )
        kinds = ("weight", "bias") if config.model_type == "qwen2" else ("weight",)
        for kind in kinds:
            projections = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
            yield (
                f"{attention}linear_qkv.{kind}",
                Recipe(projections, _ROWS, config.num_key_value_heads),
            )
        if config.model_type == "qwen3":
            for x in "qk":
                name = f"{theirs}self_attn.{x}_norm.weight"
                yield f"{attention}{x}_layernorm.weight", Recipe((name,))
        output = f"{theirs}self_attn.o_proj.weight"
        yield f"{attention}linear_proj.weight", Recipe((output,), _COLUMNS)
        yield (
            f"{mlp}linear_fc1.layer_norm_weight"
            if fused_norms
            else f"{ours}pre_mlp_layernorm.weight",
            Recipe((f"{theirs}post_attention_layernorm.weight",)),
        )
        gate_up = tuple(f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up"))
        yield f"{mlp}linear_fc1.weight", Recipe(gate_up, _ROWS)
        yield f"{mlp}linear_fc2.weight", Recipe((f"{theirs}mlp.down_proj.weight",), _COLUMNS)
    yield "decoder.final_layernorm.weight", Recipe(("model.norm.weight",))


class HFWeights:
    """The tensors of a Hugging Face folder, read part by part.

    Args:
        folder: with ``model.safetensors``, or with an index and the files that it names.

    Raises:
        ConfigError: no such files, or an index that is none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._opened: dict[Path, Any] = {}
        self._file_of = self._places()

    def dtype(self) -> torch.dtype:
        """The dtype in which the embedding is saved."""
        found: torch.dtype = self._slice(_EMBEDDING)[:1].dtype
        return found

    @torch.no_grad()
    def load(
        self, model: nn.Module, config: Any, *, fused_norms: bool, tp_rank: int, tp_size: int
    ) -> None:
        """Copy this rank's part of the weights into a GPT.

        A vocabulary that tensor parallelism does not divide is padded with rows of zeros. No more
        than one tensor of the GPT, and what it is made of, is held besides the GPT.

        Args:
            model: a GPT without an output layer of its own.
            config: of transformers.
            fused_norms: see `recipes`.
            tp_rank: this rank.
            tp_size: how many ranks share the matrices.

        Raises:
            ConfigError: a tensor is missing or not of the shape that the configuration says.
        """
        parameters = dict(model.named_parameters())
        for name, recipe in recipes(config, fused_norms=fused_norms):
            parts = [self._part(public, recipe.axis, tp_rank, tp_size) for public in recipe.names]
            part, parameter = recipe.fuse(parts, tp_size), parameters.pop(name)
            if part.shape != parameter.shape:
                raise ConfigError(
                    f"target {self.folder}: {' and '.join(recipe.names)} do not have the shape "
                    f"that its config.json says ({tuple(part.shape)} a rank, not "
                    f"{tuple(parameter.shape)})"
                )
            parameter.copy_(part)
        assert not parameters, f"nothing was read for {sorted(parameters)}"

    def _part(self, name: str, axis: int | None, rank: int, size: int) -> torch.Tensor:
        """Rank r's part of a tensor: of n rows the r-th ceil(n / T), with zeros where none are."""
        tensor = self._slice(name)
        if axis is None:
            whole: torch.Tensor = tensor[:]
            return whole
        length = tensor.get_shape()[axis]
        share = -(-length // size)
        cut = slice(min(rank * share, length), min((rank + 1) * share, length))
        if axis == _COLUMNS:
            columns: torch.Tensor = tensor[:, cut]
            return columns
        rows: torch.Tensor = tensor[cut]
        return torch.cat([rows, rows.new_zeros(share - len(rows), *rows.shape[1:])])

    def _slice(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(
                f"target {self.folder} has no tensor {name} in its safetensors files; save the "
                "whole causal language model there"
            )
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            return self._opened[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"target file {file} cannot be read: {error}") from error

    def _places(self) -> dict[str, Path]:
        """The file of every tensor."""
        index, single = self.folder / _INDEX_FILE, self.folder / _WEIGHTS_FILE
        if single.is_file():
            try:
                with safe_open(single, framework="pt") as opened:
                    return dict.fromkeys(opened.keys(), single)
            except SafetensorError as error:
                raise ConfigError(f"target file {single} cannot be read: {error}") from error
        if not index.is_file():
            raise ConfigError(
                f"target {self.folder} has no {_WEIGHTS_FILE} and no {_INDEX_FILE}; save it as "
                "safetensors, or use --online-target-backend hf"
            )
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"target file {index} has no weight_map of names and files"
            ) from error
