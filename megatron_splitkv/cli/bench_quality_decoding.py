"""Held-out prompts of the quality study, decoded speculatively with one drafter after another."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_splitkv.bench.quality import Scores
from megatron_splitkv.bench.quality_data import PROMPTS_FILE, TARGET_FOLDER
from megatron_splitkv.bench.quality_shape import QualityShape
from megatron_splitkv.data.target import Progress, load_target
from megatron_splitkv.evaluate import DraftModel
from megatron_splitkv.evaluate.cached_target import target_texts
from megatron_splitkv.evaluate.drafters import ModelDrafter, NGramDrafter
from megatron_splitkv.evaluate.greedy import GreedyText, compare_with_greedy, greedy_decode
from megatron_splitkv.evaluate.heads import proposal_head
from megatron_splitkv.evaluate.recorded_target import RecordedTarget
from megatron_splitkv.evaluate.speculative import speculative_decode
from megatron_splitkv.export import export_drafter, read_drafter

_BATCH = 8


class HeldOutDecoding:
    """Measures drafters of one target, see `bench.quality.Measure`.

    The target's plain greedy text does not depend on the drafter: it is decoded once, and every
    drafter's text is held against it.
    """

    def __init__(self) -> None:
        self._target: Any = None
        self._greedy: dict[int, GreedyText] = {}

    def __call__(
        self, shape: QualityShape, data: Path, checkpoints: Path, drafter: Path, progress: Progress
    ) -> Scores:
        """Export, then decode every held-out sample at every context.

        A prompt is the beginning of a sample, the last turn's greedy part left away: with what is
        decoded it fills the context exactly.
        """
        export_drafter(checkpoints, drafter)
        config, tensors = read_drafter(drafter)
        samples: list[list[int]] = json.loads((data / PROMPTS_FILE).read_text())
        prompts = [s[: context - shape.spoken] for s in samples for context in shape.contexts]
        if self._target is None:
            self._target = load_target(data / TARGET_FOLDER, torch.float32)
        model = DraftModel.from_tensors(config, tensors)
        proposer = ModelDrafter(model, proposal_head(config, {}), self._target)
        options: dict[str, Any] = {"max_new_tokens": shape.spoken, "batch_size": _BATCH}
        counts = np.zeros((2, len(prompts)), dtype=np.int64)
        comparisons = []
        with target_texts(self._target, config.target_layer_ids) as new_texts:
            if not self._greedy:
                self._greedy.update(greedy_decode(new_texts(), prompts, **options))
            options["num_proposals"] = config.num_proposals
            texts = speculative_decode(new_texts(), proposer, prompts, **options)
            decoded = dict(_watched(texts, len(prompts), progress))
            for i, text in decoded.items():
                counts[:, i] = sum(step.produced for step in text.steps), len(text.steps)
                comparisons.append(
                    compare_with_greedy(text.new_tokens, self._greedy[i], new_texts())
                )
        references = [self._greedy[i] for i in range(len(prompts))]
        replays = speculative_decode(RecordedTarget(references), NGramDrafter(), prompts, **options)
        repeated = [step.produced for _, text in replays for step in text.steps]
        produced, draft_steps = counts.reshape(2, len(samples), len(shape.contexts))
        return Scores(
            produced,
            draft_steps,
            greedy_equal=all(comparison.equal for comparison in comparisons),
            near_ties=sum(comparison.near_ties for comparison in comparisons),
            ngram=sum(repeated) / len(repeated),
        )


def _watched[T](items: Iterable[T], total: int, progress: Progress) -> Iterator[T]:
    for done, item in enumerate(items, start=1):
        progress(done, total)
        yield item
