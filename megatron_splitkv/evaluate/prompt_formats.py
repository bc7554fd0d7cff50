"""What a line of a prompts file may hold: our own ids and texts, and public data sets as they come.

=====================  =========================================================================
field                  read as
=====================  =========================================================================
token_ids, input_ids   the prompt itself
conversations,         a chat; what the assistant says last is left to the target
messages
turns                  MT-Bench: the first turn, a question
question               GSM8K, a question
problem                MATH-500, a question
prompt                 HumanEval, MBPP: a plain text. A list: MT-Bench's turns, as some copies
                       name them
text                   MBPP's older name, a plain text
=====================  =========================================================================

The first of these fields that a line has counts. Its name is the line's ``id``, ``task_id``,
``question_id``, ``unique_id`` or ``prompt_id``, else its number.

Source: the fields of openai/gsm8k, HuggingFaceH4/MATH-500, openai/human-eval,
google-research-datasets/mbpp and lm-sys/FastChat's `question.jsonl`, as z-lab/dflash,
`dflash/benchmark.py`, reads them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.text import has_lone_surrogate

_IDS = ("id", "task_id", "question_id", "unique_id", "prompt_id")
_FIELDS = (
    "token_ids",
    "input_ids",
    "conversations",
    "messages",
    "turns",
    "question",
    "problem",
    "prompt",
    "text",
)


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


class Question(NamedTuple):
    """Messages that a chat model answers."""

    messages: tuple[Message, ...]


# Token ids, a plain text, or a question.
Prompt = list[int] | str | Question


def read_record(values: Any, where: str, *, default_id: str) -> tuple[str, Prompt]:
    """Read the prompt of one line.

    Args:
        values: the line's JSON.
        where: file and line, for messages.
        default_id: name of a line without one.

    Returns:
        Name and prompt.

    Raises:
        ConfigError: the line holds no prompt, or an empty one.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no JSON object")
    name = next((str(values[key]) for key in _IDS if key in values), default_id)
    field = next((key for key in _FIELDS if values.get(key) is not None), None)
    if field is None:
        raise ConfigError(f'{where} has neither "token_ids" nor "prompt" nor {_listed()}')
    value = values[field]
    if field in ("token_ids", "input_ids"):
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ConfigError(f"{where}: token ids must be a list of integers")
        prompt: Prompt = value
    elif field in ("conversations", "messages"):
        prompt = Question(_messages(value, f"{where}: {field}"))
    elif isinstance(value, list):
        first = value[0] if value and field in ("turns", "prompt") else None
        prompt = Question((Message("user", _text(first, f"{where}: {field}")),))
    elif field in ("question", "problem"):
        prompt = Question((Message("user", _text(value, f"{where}: {field}")),))
    else:
        prompt = _text(value, f"{where}: {field}")
    if not prompt:
        raise ConfigError(f"{where}: {field} is empty; remove the line")
    return name, prompt


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ConfigError(f'{where} must be a list of {{"role", "content"}}')
    messages = [
        Message(_text(message.get("role"), where), _text(message.get("content"), where))
        for message in value
    ]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"{where} leaves the target nothing to answer")
    return tuple(messages)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} must be a text that is not empty")
    if has_lone_surrogate(value):
        raise ConfigError(f"{where} holds half of a surrogate pair, which is no text; mend it")
    return value


def _listed() -> str:
    return ", ".join(f'"{field}"' for field in _FIELDS if field not in ("token_ids", "prompt"))
