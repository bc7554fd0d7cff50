"""Finished prompts, written aside one by one, so that an interrupted evaluation goes on.

A JSONL file: the inputs of the evaluation first, then a line for every finished prompt. A line is
written in one piece; what a kill leaves of the last one is cut off at the next start.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron_splitkv.config import ConfigError
from megatron_splitkv.evaluate.greedy import Comparison
from megatron_splitkv.evaluate.prompts import EvaluationPrompt
from megatron_splitkv.evaluate.result import METHODS
from megatron_splitkv.evaluate.speculative import DraftStep

# Inputs that are known by a digest, and what a changed one means.
_CONTENTS = {
    "drafter": "the drafter's files changed",
    "target": "the target's files changed",
    "prompts": "the prompts (or --limit) changed",
}
# What a model is made of. Other files of its folder do not change it, and may be our own: a
# report and its journal are often written beside the drafter.
_MODEL_FILES = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


@dataclass(frozen=True)
class PromptOutcome:
    """What was measured on one prompt.

    Args:
        steps: the draft steps of every method.
        comparison: the trained drafter's text against greedy decoding.
    """

    steps: dict[str, list[DraftStep]]
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"steps": self.steps, "comparison": asdict(self.comparison)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        steps = {m: [DraftStep(*step) for step in values["steps"][m]] for m in METHODS}
        return cls(steps, Comparison(**values["comparison"]))


class Journal:
    """The file of an evaluation that has not ended yet.

    Args:
        path: of the file.
        inputs: what the outcomes depend on, plain values.
        overwrite: forget what the file holds.

    Raises:
        ConfigError: the file is of an evaluation with other inputs, or is no such file.
    """

    def __init__(
        self, path: str | os.PathLike[str], inputs: dict[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.finished: dict[int, PromptOutcome] = {}
        if overwrite or not self.path.exists():
            self._start(inputs)
        else:
            self._go_on(inputs)

    def add(self, prompt: int, outcome: PromptOutcome) -> None:
        """Write down what a prompt gave.

        Args:
            prompt: its place among the prompts.
            outcome: of it.
        """
        self.finished[prompt] = outcome
        with self.path.open("a") as file:
            file.write(json.dumps({"prompt": prompt} | outcome.to_json()) + "\n")

    def remove(self) -> None:
        """Remove the file: the evaluation has ended and its report is written."""
        self.path.unlink()

    def _start(self, inputs: dict[str, Any]) -> None:
        aside = self.path.with_name(self.path.name + ".new")
        aside.write_text(json.dumps({"inputs": inputs}) + "\n")
        os.replace(aside, self.path)

    def _go_on(self, inputs: dict[str, Any]) -> None:
        try:
            text = self.path.read_text()
            whole = text[: text.rfind("\n") + 1]
            header, *lines = map(json.loads, whole.splitlines())
            known = dict(header["inputs"])
            self.finished = {line["prompt"]: PromptOutcome.from_json(line) for line in lines}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is no unfinished evaluation; move it away, or start anew with "
                "--overwrite"
            ) from error
        changed = [
            _shown(name, known.get(name), value)
            for name, value in inputs.items()
            if known.get(name) != value
        ]
        if changed:
            if not self.finished:  # nothing to lose
                self._start(inputs)
                return
            raise ConfigError(
                f"{self.path} is of an unfinished evaluation with other inputs: "
                f"{', '.join(changed)}; start anew with --overwrite"
            )
        if whole != text:
            os.truncate(self.path, len(whole.encode()))


def _shown(name: str, before: Any, now: Any) -> str:
    """What changed; of contents, which are known by their digests, only that they did."""
    return _CONTENTS.get(name) or f"{name} was {before}, is {now}"


def evaluation_inputs(
    drafter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    prompts: Sequence[EvaluationPrompt],
) -> dict[str, Any]:
    """What tells one evaluation from another: the models' files and the prompts.

    Configuration, weights and tokenizer count by name, size and time of their last change: weights
    may be too many to read.

    Args:
        drafter: the exported folder.
        target: the Hugging Face folder.
        prompts: what is continued.
    """
    return {
        "drafter": _files_digest(Path(drafter)),
        "target": _files_digest(Path(target)),
        "prompts": _digest(*((prompt.id, prompt.token_ids) for prompt in prompts)),
    }


def _files_digest(folder: Path) -> str:
    found = {file for pattern in _MODEL_FILES for file in folder.glob(pattern) if file.is_file()}
    files = [(file.name, file.stat()) for file in sorted(found)]
    return _digest(*((name, stat.st_size, stat.st_mtime_ns) for name, stat in files))


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
