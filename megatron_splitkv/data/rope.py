"""Rotary positions whose frequencies follow the length that is read.

Most kinds of RoPE turn a position by the same angles in every document. Two of transformers' do
not: ``longrope`` has other frequencies as soon as more than some length is read at once, and
``dynamic`` changes them with the longest text that the model has read so far.

Source: ``dynamic_rope_update`` in transformers' ``modeling_rope_utils.py``.
"""

from typing import Any

from megatron_splitkv.config import ConfigError


def rope_types(config: Any) -> frozenset[str]:
    """The kinds of RoPE that a target's layers have.

    Args:
        config: transformers' configuration of the target; of a nested one the text model counts.
    """
    return frozenset(_type(parameters) for parameters in _parameters(_text(config)))


def rope_switches(config: Any) -> tuple[int, ...]:
    """Lengths above which a text is read with other frequencies, ascending.

    Args:
        config: as for `rope_types`.

    Raises:
        ConfigError: no length decides, since what was read before counts.
    """
    text = _text(config)
    for name in sorted(rope_types(config)):
        if "dynamic" in name:
            raise ConfigError(
                f"the target's RoPE of type {name!r} depends on what it read before, so that no "
                "document has features of its own; for documents of up to "
                f"{text.max_position_embeddings} tokens give a copy of the target with rope_type "
                "'default' in its config.json: the same frequencies"
            )
    return tuple(
        sorted(
            {
                parameters.get("original_max_position_embeddings") or text.max_position_embeddings
                for parameters in _parameters(text)
                if _type(parameters) == "longrope"
            }
        )
    )


def longest_document(config: Any, batch_tokens: int) -> int | None:
    """Tokens of the longest document that a target reads as if it were read whole.

    Args:
        config: as for `rope_types`.
        batch_tokens: of one forward pass; longer documents are read in chunks.

    Returns:
        None where there is no limit.

    Raises:
        ConfigError: see `rope_switches`.
    """
    switches = rope_switches(config)
    return max(switches[0], batch_tokens) if switches else None


def check_document_length(config: Any, longest: int, batch_tokens: int) -> None:
    """Refuse documents that chunks would read with other frequencies than the whole.

    Args:
        config: as for `rope_types`.
        longest: tokens that a document may have.
        batch_tokens: of one forward pass.

    Raises:
        ConfigError: naming limit and remedy; see also `rope_switches`.
    """
    most = longest_document(config, batch_tokens)
    if most is not None and longest > most:
        raise ConfigError(
            f"the target's RoPE (longrope) changes above {rope_switches(config)[0]} tokens, and "
            f"documents of up to {longest} do not fit into --batch-tokens {batch_tokens} to be "
            f"read whole; give --batch-tokens {longest}, or cut with --sequence-length {most}"
        )


def check_answer_length(config: Any, question: int, answer: int) -> None:
    """Refuse answers in whose midst the frequencies change: the tokens before keep the old ones.

    Args:
        config: as for `rope_types`.
        question: tokens that a question may have, with all before it.
        answer: tokens that an answer may have.

    Raises:
        ConfigError: naming limit and remedy; see also `rope_switches`.
    """
    most = longest_document(config, 0)
    if most is not None and question + answer > most:
        raise ConfigError(
            f"the target's RoPE (longrope) changes above {most} tokens, and --sequence-length "
            f"{question} with --max-new-tokens {answer} lets an answer cross that; give at most "
            f"{most} in both together"
        )


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _parameters(text: Any) -> list[dict[str, Any]]:
    """The sets of parameters: one, or one for each type of layer; none without RoPE."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or ([found] if found else [])


def _type(parameters: dict[str, Any]) -> str:
    name: str = parameters.get("rope_type") or parameters.get("type") or "default"
    return name
