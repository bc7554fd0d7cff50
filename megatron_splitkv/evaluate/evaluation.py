"""The measurement: a trained drafter and its controls on the same prompts and the same target."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress
from megatron_splitkv.evaluate.cached_target import CachedTarget, can_batch, target_texts
from megatron_splitkv.evaluate.draft_model import DraftModel
from megatron_splitkv.evaluate.drafters import Drafter, ModelDrafter, NGramDrafter
from megatron_splitkv.evaluate.greedy import GreedyText, compare_with_greedy, greedy_decode
from megatron_splitkv.evaluate.heads import ProposalHead, proposal_head, untrained_head
from megatron_splitkv.evaluate.journal import Journal, PromptOutcome
from megatron_splitkv.evaluate.prompts import EvaluationPrompt
from megatron_splitkv.evaluate.recorded_target import RecordedTarget
from megatron_splitkv.evaluate.result import TRAINED, EvaluationResult
from megatron_splitkv.evaluate.speculative import DraftStep, speculative_decode
from megatron_splitkv.evaluate.target_fit import check_drafter, check_prompts

DEFAULT_BATCH_SIZE = 8
# Texts in flight times the longest one: what keys and values may take when nobody chose.
DEFAULT_BATCH_TOKENS = 65536
# A wave is decoded by every method before the next one: its greedy features are in memory, and
# it is what an interruption loses. Longer waves keep batches full for longer.
_BATCHES_A_WAVE = 4
_GREEDY, _SPECULATIVE, _CONTROLS = "greedy decoding", "speculative decoding", "controls"


def evaluate_drafter(
    drafter: DraftModel,
    target: Any,
    prompts: Sequence[EvaluationPrompt],
    *,
    head: ProposalHead | None = None,
    max_new_tokens: int = 128,
    stop_token_ids: Collection[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    stages: Stages | None = None,
    journal: Journal | None = None,
) -> EvaluationResult:
    """Measure acceptance lengths by greedy speculative decoding.

    The trained drafter decodes for real, and its text is held against plain greedy decoding. The
    controls are replayed on the greedy text, which gives the counts that real decoding gives:

    * ``untrained``: a freshly initialised drafter of the same shape;
    * ``no_context``: the trained one with the target's features zeroed;
    * ``ngram``: repeating what followed the last occurrence of the text's ending.

    Args:
        drafter: the trained one's backbone, on the target's device.
        target: its Hugging Face target, from `data.target.load_target`; fp32 for exact equality.
        prompts: what to continue.
        head: the trained one's head, from `heads.proposal_head`; None for DFlash, which has no
            tensors of its own.
        max_new_tokens: longest continuation.
        stop_token_ids: ids that end a text; the drafter's ``eos_token_ids`` when None.
        batch_size: texts decoded together; None for `DEFAULT_BATCH_SIZE`, fewer where that many
            of the longest text would exceed `DEFAULT_BATCH_TOKENS` tokens, one if the target has
            recurrent layers.
        seed: of the untrained drafter and of the bootstrap.
        stages: clock and watcher of the stages.
        journal: knows prompts that are finished, and learns the others.

    Raises:
        ConfigError: the drafter is of another target, a prompt does not fit the target, or no
            prompt left anything to draft.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"the batch size is {batch_size}, it must be at least 1")
    config = drafter.config
    check_drafter(config, target)
    check_prompts(prompts, target, max_new_tokens)
    stages = stages or Stages()
    outcomes = dict(journal.finished) if journal else {}
    clock = _Clock(stages, len(outcomes), len(prompts))
    waiting = [i for i in range(len(prompts)) if i not in outcomes]
    if batch_size is None and not can_batch(target):
        batch_size = 1
    stop = frozenset(config.eos_token_ids if stop_token_ids is None else stop_token_ids)
    size = _BATCHES_A_WAVE * (batch_size or DEFAULT_BATCH_SIZE)
    with target_texts(target, config.target_layer_ids) as new_texts:
        methods = _Methods(drafter, head or proposal_head(config, {}), target, seed)
        for at in range(0, len(waiting), size):
            # Longest first: texts that run together differ less in length.
            wave = sorted(waiting[at : at + size], key=lambda i: -len(prompts[i].token_ids))
            longest = len(prompts[wave[0]].token_ids) + max_new_tokens
            fitting = min(DEFAULT_BATCH_SIZE, max(1, DEFAULT_BATCH_TOKENS // longest))
            options = {
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": stop,
                "batch_size": batch_size or fitting,
            }
            token_ids = [prompts[i].token_ids for i in wave]
            for i, outcome in zip(
                wave, methods.measure(new_texts, token_ids, options, clock), strict=True
            ):
                outcomes[i] = outcome
                if journal:
                    journal.add(i, outcome)
    in_order = [outcomes[i] for i in range(len(prompts))]
    if not any(outcome.steps[TRAINED] for outcome in in_order):
        raise ConfigError(
            "the target ended every prompt with its first token, nothing was drafted; give other "
            "prompts"
        )
    return EvaluationResult(
        prompt_ids=[prompt.id for prompt in prompts],
        prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
        truncated_tokens=[prompt.truncated_tokens for prompt in prompts],
        steps={m: [outcome.steps[m] for outcome in in_order] for m in in_order[0].steps},
        comparisons=[outcome.comparison for outcome in in_order],
        block_size=config.block_size,
        num_proposals=config.num_proposals,
        max_new_tokens=max_new_tokens,
        seed=seed,
        seconds=dict(stages.seconds),
    )


class _Methods:
    """The trained drafter and the controls, ready to decode one wave of prompts after another."""

    def __init__(self, drafter: DraftModel, head: ProposalHead, target: Any, seed: int) -> None:
        config = drafter.config
        weight = drafter.fc.weight
        generator = torch.Generator().manual_seed(seed)
        untrained = DraftModel.untrained(config, seed).to(weight)
        self._num_proposals = config.num_proposals
        self._trained: Drafter = ModelDrafter(drafter, head, target)
        self._controls: dict[str, Drafter] = {
            "untrained": ModelDrafter(untrained, untrained_head(config, generator, weight), target),
            "no_context": ModelDrafter(drafter, head, target, use_context=False),
            "ngram": NGramDrafter(),
        }

    def measure(
        self,
        new_texts: Callable[[], CachedTarget],
        prompts: Sequence[Sequence[int]],
        options: dict[str, Any],
        clock: "_Clock",
    ) -> list[PromptOutcome]:
        """Decode prompts by every method; return what each gave, in their order."""

        def steps_of(verifier: Any, drafter: Drafter, stage: str) -> list[Any]:
            texts = {}
            with clock.run(stage):
                for i, text in speculative_decode(
                    verifier, drafter, prompts, num_proposals=self._num_proposals, **options
                ):
                    texts[i] = text
                    clock.tick(stage)
            return [texts[i] for i in range(len(prompts))]

        greedy: dict[int, GreedyText] = {}
        with clock.run(_GREEDY):
            for i, text in greedy_decode(new_texts(), prompts, **options):
                greedy[i] = text
                clock.tick(_GREEDY)
        references = [greedy[i] for i in range(len(prompts))]
        texts = steps_of(new_texts(), self._trained, _SPECULATIVE)
        comparisons = [
            compare_with_greedy(text.new_tokens, reference, new_texts())
            for text, reference in zip(texts, references, strict=True)
        ]
        replays = {
            name: steps_of(RecordedTarget(references), control, _CONTROLS)
            for name, control in self._controls.items()
        }
        outcomes = []
        for i, comparison in enumerate(comparisons):
            steps: dict[str, list[DraftStep]] = {TRAINED: texts[i].steps}
            steps |= {name: replayed[i].steps for name, replayed in replays.items()}
            outcomes.append(PromptOutcome(steps, comparison))
        return outcomes


class _Clock:
    """Seconds and progress of stages that take turns."""

    def __init__(self, stages: Stages, finished: int, prompts: int) -> None:
        self._stages = stages
        self._totals = {_GREEDY: prompts, _SPECULATIVE: prompts, _CONTROLS: 3 * prompts}
        self._done = {_GREEDY: finished, _SPECULATIVE: finished, _CONTROLS: 3 * finished}
        self._progress: dict[str, Progress] = {}
        for stage, total in self._totals.items():
            stages.seconds[stage] = 0.0
            self._progress[stage] = stages.watch(stage)
            self._progress[stage](self._done[stage], total)

    @contextmanager
    def run(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = self._stages.seconds[stage] + time.perf_counter() - start
        self._stages.seconds[stage] = round(seconds, 3)

    def tick(self, stage: str) -> None:
        """One more text of a stage is finished."""
        self._done[stage] += 1
        self._progress[stage](self._done[stage], self._totals[stage])
