"""JSON that other programs wrote: read as an object whose known keys have the types of their kind.

What a key says is checked by its readers; here only that they can look at it.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError


def _integer(value: object) -> bool:
    return type(value) is int  # a truth value is an int too


def _number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def _boolean(value: object) -> bool:
    return isinstance(value, bool)


def _string(value: object) -> bool:
    return isinstance(value, str)


def _object(value: object) -> bool:
    return isinstance(value, Mapping)


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


# Every key that a reader looks at, wherever it lies; null is as good as left out.
_TYPES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "an integer",
        _integer,
        "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads "
        "head_dim vocab_size max_position_embeddings bos_token_id pad_token_id sliding_window "
        "max_window_layers block_size mask_token_id num_target_layers draft_vocab_size "
        "target_hidden_size emb_dim gru_hidden_dim pure_draft_prefix_len markov_rank num_anchors "
        "speculative_tokens",
    ),
    (
        "a finite number",
        _number,
        "rope_theta rms_norm_eps input_embedding_scale final_logit_softcapping "
        "confidence_head_alpha",
    ),
    (
        "true or false",
        _boolean,
        "use_sliding_window is_causal sliding_window_non_causal shift_label",
    ),
    ("a string", _string, "projector_type markov_head_type speculators_model_type name_or_path"),
    (
        "an object",
        _object,
        "rope_parameters rope_scaling dflash_config dspark_config transformer_layer_config "
        "speculators_config verifier",
    ),
    ("a list of strings", _list_of(_string), "architectures layer_types"),
    ("a list of integers", _list_of(_integer), "target_layer_ids aux_hidden_state_layer_ids"),
    ("a list of objects", _list_of(_object), "proposal_methods"),
    (
        "an integer or a list of them",
        lambda value: _integer(value) or _list_of(_integer)(value),
        "eos_token_id",
    ),
)
_TYPE_OF = {name: (word, fits) for word, fits, names in _TYPES for name in names.split()}


def read_object(file: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object.

    Args:
        file: the file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it holds something else, or is nested deeper than the parser goes.
    """
    try:
        found = json.loads(file.read_text())
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return found


def check_types(values: Mapping[str, Any], inside: str = "") -> None:
    """Refuse known keys of another type than their readers take, those of known parts too.

    Args:
        values: the parsed ``config.json``, or a part of it.
        inside: what leads to the part, for the message.

    Raises:
        ConfigError: naming the key, its value and what it must be.
    """
    for name, value in values.items():
        if value is None or name not in _TYPE_OF:
            continue
        word, fits = _TYPE_OF[name]
        if not fits(value):
            raise ConfigError(
                f"config.json of the drafter is malformed: {inside}{name} is "
                f"{reprlib.repr(value)}, it must be {word}"
            )
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                check_types(part, f"{inside}{name}.")
