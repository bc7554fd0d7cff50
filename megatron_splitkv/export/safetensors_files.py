"""The tensors of a public checkpoint: one safetensors file, or several with an index."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.export.json_input import read_object

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Copies of the target's that some exporters add. Source: deepseek-ai/DeepSpec,
# `deepspec/modeling/dspark/qwen3/modeling.py`; vllm-project/speculators, `models/dflash/core.py`.
_OF_TARGET = (EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight")
# Derived numbers that old releases of transformers saved.
_BUFFERS = ("rotary_emb.inv_freq",)


def read_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint folder.

    Args:
        folder: with a weights file, or with an index and the files it names.
        names: which ones, as far as they are there; all if None.

    Raises:
        ConfigError: the index has no map, or does not say what its files hold.
        ValueError: the index is no JSON object.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys() if names is None else names:
                if name in opened.keys():  # noqa: SIM118 (no mapping)
                    tensors[name] = opened.get_tensor(name)
    return tensors


def _files(folder: Path) -> list[str]:
    """Names of the weights files; each holds exactly what an index promises."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [WEIGHTS_FILE]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ConfigError(f"{INDEX_FILE} has no weight_map of names and files")
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file:
            raise ConfigError(f"{INDEX_FILE} names {file!r}, which is no file beside it")
        with safe_open(folder / file, framework="pt") as opened:
            here = set(opened.keys())
        promised = {name for name, place in places.items() if place == file}
        if promised != here:
            odd = min(promised ^ here)
            raise ConfigError(f"{INDEX_FILE} and {file} disagree about {odd}")
    return files


def without_vocabulary(
    tensors: Mapping[str, torch.Tensor], config: DFlashConfig
) -> dict[str, torch.Tensor]:
    """Leave out copies of what is the target's.

    Args:
        tensors: by public names.
        config: the drafter.

    Raises:
        ConfigError: a copy of the embedding or the head is of another vocabulary, or the drafter
            maps a vocabulary of its own.
    """
    for name in ("d2t", "t2d"):
        if name in tensors:
            raise ConfigError(
                f"tensor {name} maps a vocabulary of the drafter's own, which is not supported"
            )
    whole = (config.vocab_size, config.hidden_size)
    for name in (EMBEDDING, HEAD):
        if name in tensors and tuple(tensors[name].shape) != whole:
            raise ConfigError(
                f"tensor {name} is {tuple(tensors[name].shape)}, the target's is {whole}: a "
                "padded or another vocabulary is not supported"
            )
    drop = {*_OF_TARGET, *_BUFFERS}
    return {name: tensor for name, tensor in tensors.items() if name not in drop}
