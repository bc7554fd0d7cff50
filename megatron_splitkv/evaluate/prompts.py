"""Reads the prompts of an evaluation."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError


@dataclass(frozen=True)
class EvaluationPrompt:
    """What the target continues.

    Args:
        id: name, for the report.
        token_ids: the prompt in the target's vocabulary, special tokens included.
    """

    id: str
    token_ids: list[int]


def read_prompts(
    path: str | os.PathLike[str], tokenize: Callable[[str], list[int]]
) -> list[EvaluationPrompt]:
    """Read prompts, one JSON object a line.

    A line has an ``"id"`` (the line number if missing) and the prompt: token ids under
    ``"token_ids"`` or ``"input_ids"``, else a text under ``"prompt"`` or ``"text"``, which is
    tokenised as it is (no chat template).

    Args:
        path: the JSONL file.
        tokenize: text to token ids; called only for lines without token ids.

    Raises:
        ConfigError: the file is unreadable or empty, or a line is no prompt; names the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {path} cannot be read: {error}") from error
    prompts = [
        _prompt(line, f"{path}, line {number}", str(number), tokenize)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"prompts {path} holds no prompt")
    return prompts


def _prompt(
    line: str, where: str, default_id: str, tokenize: Callable[[str], list[int]]
) -> EvaluationPrompt:
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no JSON object")
    token_ids = values.get("token_ids", values.get("input_ids"))
    if token_ids is None:
        text = values.get("prompt", values.get("text"))
        if not isinstance(text, str):
            raise ConfigError(f'{where} has neither "token_ids" nor "prompt"')
        token_ids = tokenize(text)
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise ConfigError(f"{where}: token ids must be a list of integers")
    return EvaluationPrompt(str(values.get("id", default_id)), token_ids)
