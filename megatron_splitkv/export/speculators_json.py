"""A drafter's ``config.json`` in the layout of the speculators library, and back.

The library counts tapped layers differently: its layer id i is the hidden state that *enters*
layer i, ours is the layer whose output is tapped, so its ids are ours + 1. The Qwen3 keys lie in
``transformer_layer_config``; tensors have the names of the z-lab layout.

The library knows DFlash and DSpark. It has no Domino.

Source: vllm-project/speculators 0.9.0, `models/dflash/config.py`, `models/dspark/config.py`,
`convert/dflash/converter.py`, `config.py`, `proposals/greedy.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.drafter.kinds import config_class
from megatron_splitkv.export.backbone_json import (
    backbone_fields,
    dtype_name,
    qwen3_keys,
    refuse_other_values,
    required,
)
from megatron_splitkv.export.json_input import check_types, read_object

KIND_KEY = "speculators_model_type"
_VERSION = "0.9.0"
_ARCHITECTURES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def to_speculators_json(
    config: DFlashConfig, dtype: torch.dtype, *, target: str | None
) -> dict[str, Any]:
    """Describe a drafter the way the speculators library, and vLLM through it, reads it.

    Args:
        config: the drafter.
        dtype: of the tensors beside it.
        target: folder or name of the model that it drafts for, from which the library takes the
            embedding and the head.

    Raises:
        ConfigError: the library has no such kind of drafter, or no way to say what this one does.
    """
    if config.kind not in _ARCHITECTURES:
        raise ConfigError(
            f"the speculators layout has no {config.kind} drafters, only "
            f"{', '.join(_ARCHITECTURES)}; export to zlab"
        )
    for name, plain in (("input_embedding_scale", 1.0), ("final_logit_softcapping", None)):
        if getattr(config, name) != plain:
            raise ConfigError(
                f"the speculators layout cannot say {name} {getattr(config, name)}; export to zlab"
            )
    own: dict[str, Any] = {}
    if isinstance(config, DSparkConfig):
        own = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return {
        "architectures": [_ARCHITECTURES[config.kind]],
        KIND_KEY: config.kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_proposals,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target,
                "architectures": _config_of(target).get("architectures") or [],
            },
        },
        "dtype": dtype_name(dtype),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": config.label_shift == 1,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        **own,
        # Not the library's: it finds them in the target.
        "num_target_layers": config.num_target_layers,
        "transformer_layer_config": qwen3_keys(config),
    }


def from_speculators_json(
    values: Mapping[str, Any], *, num_target_layers: int | None = None
) -> DFlashConfig:
    """Read a ``config.json`` of the speculators library.

    Args:
        values: the parsed file.
        num_target_layers: layers of the target, which the layout does not say: for files that
            are not ours and whose target is in no folder here.

    Raises:
        ConfigError: a key is missing, or the drafter is of a kind that is not supported.
    """
    check_types(values)
    kind = values.get(KIND_KEY)
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"a drafter with {KIND_KEY} {kind!r} is not supported, only {', '.join(_ARCHITECTURES)}"
        )
    layer = {**required(values, "transformer_layer_config")}
    layer["sliding_window_non_causal"] = values.get("sliding_window_non_causal")
    _refuse_other_vocabulary(values, layer)
    shift = 1 if kind == "dspark" else 0
    refuse_other_values(
        values,
        {
            "target_hidden_size": (layer.get("hidden_size"),),
            "sample_from_anchor": (bool(shift),),
            "enable_confidence_head": (True,),
            "confidence_head_with_markov": (True,),
        },
    )
    own = {}
    if kind == "dspark":
        own = {
            "markov_rank": values.get("markov_rank", 256),
            "markov_head_type": values.get("markov_head_type", "vanilla"),
        }
    try:
        config = config_class(kind)(
            **backbone_fields(layer),
            num_target_layers=_num_target_layers(values, num_target_layers),
            target_layer_ids=tuple(i - 1 for i in required(values, "aux_hidden_state_layer_ids")),
            mask_token_id=required(values, "mask_token_id"),
            block_size=values.get("block_size", 8),
            **own,
        )
    except ConfigError:  # a ValueError too
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of the drafter is malformed: {error}") from error
    _check_proposals(values, config)
    return config


def _refuse_other_vocabulary(values: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    drafted, whole = values.get("draft_vocab_size"), layer.get("vocab_size")
    if drafted not in (None, whole):
        raise ConfigError(
            f"draft_vocab_size is {drafted}, the target's vocabulary has {whole} tokens: drafters "
            "with a vocabulary of their own are not supported"
        )


def _check_proposals(values: Mapping[str, Any], config: DFlashConfig) -> None:
    for method in (values.get("speculators_config") or {}).get("proposal_methods") or []:
        tokens = method.get("speculative_tokens")
        if tokens is not None and tokens > config.num_proposals:
            raise ConfigError(
                f"speculative_tokens is {tokens}, a {config.kind} block of {config.block_size} "
                f"proposes {config.num_proposals}"
            )


def _num_target_layers(values: Mapping[str, Any], otherwise: int | None) -> int:
    found = values.get("num_target_layers")
    if found is None:
        verifier = (values.get("speculators_config") or {}).get("verifier") or {}
        target = _config_of(verifier.get("name_or_path"))
        text = target.get("text_config")
        found = (text if isinstance(text, dict) else target).get("num_hidden_layers", otherwise)
    if not isinstance(found, int):
        raise ConfigError(
            "config.json of the drafter does not say how many layers its target has, and names no "
            "target that is here; add num_target_layers to it"
        )
    return found


def _config_of(target: str | None) -> dict[str, Any]:
    """The target's configuration, empty where it is not in a folder here."""
    try:
        return read_object(Path(target) / "config.json") if target else {}
    except (OSError, ValueError):
        return {}
