"""Does the drafter belong to this target, and can the target continue these prompts?"""

from collections.abc import Sequence
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.evaluate.prompts import EvaluationPrompt


def check_drafter(config: DFlashConfig, target: Any) -> None:
    """Refuse a drafter whose shapes are another target's.

    Args:
        config: the drafter.
        target: from `data.target.load_target`.

    Raises:
        ConfigError: naming the first disagreement.
    """
    target_config = target.config.get_text_config()
    for what, ours, theirs in (
        ("hidden size", config.hidden_size, target_config.hidden_size),
        ("vocabulary", config.vocab_size, target.get_input_embeddings().weight.shape[0]),
        ("number of target layers", config.num_target_layers, target_config.num_hidden_layers),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the drafter is of another target: its {what} is {ours}, the target's is {theirs}"
            )


def check_prompts(prompts: Sequence[EvaluationPrompt], target: Any, max_new_tokens: int) -> None:
    """Refuse prompts that the target cannot continue.

    Args:
        prompts: what to continue.
        target: from `data.target.load_target`.
        max_new_tokens: longest continuation.

    Raises:
        ConfigError: naming the first one.
    """
    if max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, a draft step needs at least 2")
    if not prompts:
        raise ConfigError("there is no prompt to continue")
    rows = target.get_input_embeddings().weight.shape[0]
    longest = target.config.get_text_config().max_position_embeddings
    if max_new_tokens >= longest:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt in the "
            f"target's {longest} positions; take a smaller --max-new-tokens"
        )
    for prompt in prompts:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.id!r} has no token")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < rows:
            raise ConfigError(
                f"prompt {prompt.id!r} has token ids outside the target's vocabulary of {rows}"
            )
        if len(prompt.token_ids) + max_new_tokens > longest:
            raise ConfigError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; with {max_new_tokens} "
                f"new ones it exceeds the target's {longest} positions; truncate the prompts to "
                f"{longest - max_new_tokens} tokens (--max-prompt-tokens)"
            )
