"""The measurement: a trained drafter and its controls on the same prompts and the same target."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.prepare import Stages
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.evaluate.cached_target import CachedTarget, target_texts
from megatron_splitkv.evaluate.draft_model import DraftModel
from megatron_splitkv.evaluate.drafters import DFlashDrafter, Drafter, NGramDrafter
from megatron_splitkv.evaluate.greedy import (
    Comparison,
    GreedyText,
    compare_with_greedy,
    greedy_decode,
)
from megatron_splitkv.evaluate.prompts import EvaluationPrompt
from megatron_splitkv.evaluate.recorded_target import RecordedTarget
from megatron_splitkv.evaluate.result import TRAINED, EvaluationResult
from megatron_splitkv.evaluate.speculative import (
    DraftStep,
    SpeculativeText,
    speculative_decode,
)


def evaluate_drafter(
    drafter: DraftModel,
    target: Any,
    prompts: Sequence[EvaluationPrompt],
    *,
    max_new_tokens: int = 128,
    stop_token_ids: Collection[int] | None = None,
    seed: int = 0,
    stages: Stages | None = None,
) -> EvaluationResult:
    """Measure acceptance lengths by greedy speculative decoding.

    The trained drafter decodes for real, and its text is held against plain greedy decoding. The
    controls are replayed on the greedy text, which gives the counts that real decoding gives:

    * ``untrained``: a freshly initialised drafter of the same shape;
    * ``no_context``: the trained one with the target's features zeroed;
    * ``ngram``: repeating what followed the last occurrence of the text's ending.

    Args:
        drafter: the trained one, on the target's device.
        target: its Hugging Face target, from `data.target.load_target`; fp32 for exact equality.
        prompts: what to continue, one at a time.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end a text; the drafter's ``eos_token_ids`` when None.
        seed: of the untrained drafter and of the bootstrap.
        stages: clock and watcher of the stages.

    Raises:
        ConfigError: the drafter is of another target, a prompt does not fit the target, or no
            prompt left anything to draft.
    """
    config = drafter.config
    check_fits(config, target, prompts, max_new_tokens)
    stop = frozenset(config.eos_token_ids if stop_token_ids is None else stop_token_ids)
    stages = stages or Stages()

    def decode(verifier: Any, proposer: Drafter, prompt: Sequence[int]) -> SpeculativeText:
        return speculative_decode(
            verifier,
            proposer,
            prompt,
            block_size=config.block_size,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop,
        )

    with target_texts(target, config.target_layer_ids) as new_text:
        references: list[GreedyText] = []
        with stages.stage("greedy decoding") as progress:
            for done, prompt in enumerate(prompts, start=1):
                references.append(
                    greedy_decode(
                        new_text(),
                        prompt.token_ids,
                        max_new_tokens=max_new_tokens,
                        stop_token_ids=stop,
                    )
                )
                progress(done, len(prompts))
        texts: list[SpeculativeText] = []
        trained = DFlashDrafter(drafter, target)
        with stages.stage("speculative decoding") as progress:
            for done, prompt in enumerate(prompts, start=1):
                texts.append(decode(new_text(), trained, prompt.token_ids))
                progress(done, len(prompts))
        comparisons = _compare(texts, references, new_text)

    steps: dict[str, list[list[DraftStep]]] = {TRAINED: [text.steps for text in texts]}
    if not any(steps[TRAINED]):
        raise ConfigError(
            "the target ended every prompt with its first token, nothing was drafted; give other "
            "prompts"
        )
    untrained = DraftModel.untrained(config, seed).to(drafter.fc.weight)
    controls: dict[str, Drafter] = {
        "untrained": DFlashDrafter(untrained, target),
        "no_context": DFlashDrafter(drafter, target, use_context=False),
        "ngram": NGramDrafter(),
    }
    with stages.stage("controls") as progress:
        for at, (name, control) in enumerate(controls.items()):
            steps[name] = []
            for done, reference in enumerate(references, start=1):
                replay = decode(RecordedTarget(reference), control, reference.prompt)
                steps[name].append(replay.steps)
                progress(at * len(references) + done, len(controls) * len(references))
    return EvaluationResult(
        prompt_ids=[prompt.id for prompt in prompts],
        steps=steps,
        comparisons=comparisons,
        block_size=config.block_size,
        max_new_tokens=max_new_tokens,
        seed=seed,
        seconds=dict(stages.seconds),
    )


def check_fits(
    config: DFlashConfig, target: Any, prompts: Sequence[EvaluationPrompt], max_new_tokens: int
) -> None:
    """Refuse a drafter of another target and prompts that the target cannot continue.

    Raises:
        ConfigError: naming the first disagreement.
    """
    target_config = target.config.get_text_config()
    rows = target.get_input_embeddings().weight.shape[0]
    for what, ours, theirs in (
        ("hidden size", config.hidden_size, target_config.hidden_size),
        ("vocabulary", config.vocab_size, rows),
        ("number of target layers", config.num_target_layers, target_config.num_hidden_layers),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the drafter is of another target: its {what} is {ours}, the target's is {theirs}"
            )
    if max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, a draft step needs at least 2")
    if not prompts:
        raise ConfigError("there is no prompt to continue")
    longest = target_config.max_position_embeddings
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
                f"new ones it exceeds the target's {longest} positions"
            )


def _compare(
    texts: Sequence[SpeculativeText],
    references: Sequence[GreedyText],
    new_text: Callable[[], CachedTarget],
) -> list[Comparison]:
    return [
        compare_with_greedy(text.new_tokens, reference, new_text())
        for text, reference in zip(texts, references, strict=True)
    ]
