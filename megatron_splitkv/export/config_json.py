"""A drafter's ``config.json`` in the public z-lab layout, and back, for every kind.

Engines read ``dflash_config`` first and the top level second, or only one of them: what decides
about drafting is in both. What a kind adds:

* Domino is a DFlash model with ``dflash_config.projector_type`` ``domino`` and the widths of its
  head there.
* DSpark has an architecture of its own, ``Qwen3DSparkModel``, and its keys at the top level.

Source: z-lab/dflash, `dflash/model.py`; sgl-project/SpecForge, `configs/*-dflash.json`,
`*-domino.json`, `*-dspark.json`; deepseek-ai/DeepSpec, `deepspec/modeling/dspark/qwen3/config.py`;
vllm-project/vllm, `model_executor/models/qwen3_dspark.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import default_target_layer_ids
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.drafter.kinds import config_class
from megatron_splitkv.export.backbone_json import (
    backbone_fields,
    dtype_name,
    qwen3_keys,
    refuse_other_values,
    required,
)
from megatron_splitkv.export.json_input import check_types

ARCHITECTURE = "DFlashDraftModel"
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
_KIND_OF_ARCHITECTURE = {
    ARCHITECTURE: "dflash",
    "DominoDraftModel": "domino",
    DSPARK_ARCHITECTURE: "dspark",
    "DSparkDraftModel": "dspark",
}
_KIND_OF_PROJECTOR = {None: "dflash", "dflash": "dflash", "domino": "domino", "dspark": "dspark"}
# Where the kinds' own keys may lie besides the top level.
_NESTED = ("dspark_config", "dflash_config")
_DSPARK_HEADS = {"enable_confidence_head": True, "confidence_head_with_markov": True}
# DeepSpec's model asks for it; it is of its training and changes nothing in drafting.
_DSPARK_NUM_ANCHORS = 512
# What a nested block may say without changing the architecture, beside what is read.
_ONLY: dict[str, tuple[object, ...]] = {
    "output_multiplier": (1,),
    "attention_mode": ("gqa",),
    "causal": (False,),
    "use_aux_hidden_state": (True,),
    **{name: (value,) for name, value in _DSPARK_HEADS.items()},
}
_READ = frozenset(
    {
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "projector_type",
        "input_embedding_scale",
        "final_logit_softcapping",
        "emb_dim",
        "gru_hidden_dim",
        "pure_draft_prefix_len",
        "shift_label",
        "markov_rank",
        "markov_head_type",
        "num_target_layers",
        "draft_vocab_size",
        "target_hidden_size",
        # The causality of sliding layers, checked with the layers; of training only.
        "is_causal",
        "confidence_head_alpha",
        "num_anchors",
    }
)


def to_config_json(config: DFlashConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Describe a drafter the way the public client and the serving engines read it.

    Args:
        config: the drafter, of any kind.
        dtype: of the tensors beside it.
    """
    block: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.input_embedding_scale != 1:
        block["input_embedding_scale"] = config.input_embedding_scale
    if config.final_logit_softcapping is not None:
        block["final_logit_softcapping"] = config.final_logit_softcapping
    own: dict[str, Any] = {}
    if isinstance(config, DominoConfig):
        block |= {
            "projector_type": "domino",
            "emb_dim": config.emb_dim,
            "gru_hidden_dim": config.gru_hidden_dim,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "shift_label": config.shift_label,
        }
    elif isinstance(config, DSparkConfig):
        own = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "num_anchors": _DSPARK_NUM_ANCHORS,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            **_DSPARK_HEADS,
        }
    if config.kind == "dspark":
        head: dict[str, Any] = {"architectures": [DSPARK_ARCHITECTURE]}
    else:
        head = {
            "architectures": [ARCHITECTURE],
            "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        }
    return {
        **head,
        "dtype": dtype_name(dtype),
        "block_size": config.block_size,
        "dflash_config": block,
        **own,
        "num_target_layers": config.num_target_layers,
        **qwen3_keys(config),
    }


def from_config_json(values: Mapping[str, Any]) -> DFlashConfig:
    """Read a public ``config.json``, ours or another exporter's.

    Args:
        values: the parsed file.

    Raises:
        ConfigError: a key is missing, or the drafter is of a kind that is not supported.
    """
    check_types(values)
    both = dict(values)
    for name in _NESTED:
        nested = values.get(name) or {}
        for key, value in nested.items():
            if key not in _READ | _ONLY.keys() and value is not None:
                raise ConfigError(
                    f"a drafter with {name}.{key} {value!r} is not supported: no kind of drafter "
                    "here has this key"
                )
            # Engines differ in which of them they read.
            if key in _READ and None not in (value, both.get(key)) and value != both[key]:
                raise ConfigError(
                    f"{key} is {both[key]}, in {name} it is {value}; make them the same"
                )
        both |= {key: value for key, value in nested.items() if value is not None}
    kind = _kind(both)
    of_target = {
        "draft_vocab_size": (both.get("vocab_size"),),
        "target_hidden_size": (both.get("hidden_size"),),
    }
    refuse_other_values(both, _ONLY | of_target)
    num_target_layers = required(both, "num_target_layers")
    fields = backbone_fields(both)
    taps = both.get("target_layer_ids")
    if taps is None:  # as the public client does
        taps = default_target_layer_ids(num_target_layers, fields["num_layers"])
    try:
        return config_class(kind)(
            **fields,
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(taps),
            mask_token_id=required(both, "mask_token_id"),
            block_size=both.get("block_size", 16),
            input_embedding_scale=float(both.get("input_embedding_scale") or 1.0),
            # Readers take zero for none.
            final_logit_softcapping=both.get("final_logit_softcapping") or None,
            **_own_fields(kind, both),
        )
    except ConfigError:  # a ValueError too
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json of the drafter is malformed: {error}") from error


def _kind(values: Mapping[str, Any]) -> str:
    """The kind of drafter by its architecture and its head.

    Raises:
        ConfigError: an unknown one, or the two disagree.
    """
    projector = values.get("projector_type")
    if projector not in _KIND_OF_PROJECTOR:
        raise ConfigError(f"a drafter with projector_type {projector!r} is not supported")
    found = {_KIND_OF_PROJECTOR[projector]} if projector is not None else set()
    for name in values.get("architectures") or []:
        if name not in _KIND_OF_ARCHITECTURE:
            raise ConfigError(
                f"a drafter of architecture {name!r} is not supported; known are "
                f"{', '.join(sorted(_KIND_OF_ARCHITECTURE))}"
            )
        if not (name == ARCHITECTURE and found):  # a DFlash model with another head
            found.add(_KIND_OF_ARCHITECTURE[name])
    if len(found) > 1:
        raise ConfigError(
            f"architectures {values['architectures']} and projector_type {projector!r} are of "
            "different kinds of drafters"
        )
    kind = found.pop() if found else "dflash"
    if kind != "dspark" and values.get("markov_rank"):
        raise ConfigError(
            f"a {kind} drafter with markov_rank {values['markov_rank']} is not supported, only "
            "dspark has a Markov head"
        )
    return kind


def _own_fields(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of one kind; what is left out means what the public readers take it for."""
    if kind == "domino":
        return {
            "emb_dim": required(values, "emb_dim"),
            "gru_hidden_dim": required(values, "gru_hidden_dim"),
            "pure_draft_prefix_len": values.get("pure_draft_prefix_len", 0),
            "shift_label": bool(values.get("shift_label", False)),
        }
    if kind == "dspark":
        return {
            "markov_rank": required(values, "markov_rank"),
            "markov_head_type": values.get("markov_head_type", "vanilla"),
        }
    return {}
