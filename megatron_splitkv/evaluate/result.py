"""What an evaluation found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron_splitkv.evaluate.bootstrap import Interval, bootstrap_ratios, interval
from megatron_splitkv.evaluate.greedy import NEAR_TIE_GAP, Comparison
from megatron_splitkv.evaluate.speculative import DraftStep

TRAINED = "trained"
CONTROLS = ("untrained", "no_context", "ngram")
METHODS = (TRAINED, *CONTROLS)
# Contexts shorter than this are one bin; longer ones fall into a bin for every power of two.
SHORTEST_CONTEXT = 128


class ContextBin(NamedTuple):
    """Draft steps whose anchors have between `start` and `stop` - 1 tokens before them.

    Args:
        start: shortest context.
        stop: the next bin's shortest context.
        steps: draft steps of each method.
        accept_len: their acceptance length; None without a step.
    """

    start: int
    stop: int
    steps: dict[str, int]
    accept_len: dict[str, float | None]


@dataclass(frozen=True)
class EvaluationResult:
    """Draft steps of every method on every prompt, and whether the text was greedy's.

    Args:
        prompt_ids: the prompts, in order.
        prompt_lengths: tokens of each.
        truncated_tokens: tokens that each lost before it was read.
        steps: method -> one list of draft steps a prompt, see `METHODS`.
        comparisons: the trained drafter's text of each prompt against greedy decoding.
        block_size: B.
        num_proposals: tokens that a draft step proposes at most.
        max_new_tokens: longest continuation.
        seed: of the bootstrap.
        seconds: wall time of each stage.
    """

    prompt_ids: Sequence[str]
    prompt_lengths: Sequence[int]
    truncated_tokens: Sequence[int]
    steps: dict[str, list[list[DraftStep]]]
    comparisons: Sequence[Comparison]
    block_size: int
    num_proposals: int
    max_new_tokens: int
    seed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def accept_len(self) -> dict[str, float]:
        """Acceptance length of each method: tokens produced over draft steps, all prompts."""
        return {m: float(self._produced(m).sum() / self._counts(m).sum()) for m in self.steps}

    @property
    def intervals(self) -> dict[str, Interval | None]:
        """95 % bootstrap interval of each method over prompts; None for fewer than two."""
        if not self._can_resample:
            return dict.fromkeys(self.steps)
        return {m: interval(row) for m, row in self._resampled().items()}

    @property
    def differences(self) -> dict[str, tuple[float, Interval | None]]:
        """Trained minus each control, with the interval of the paired difference."""
        means, samples = self.accept_len, self._resampled() if self._can_resample else None
        found: dict[str, tuple[float, Interval | None]] = {}
        for control in CONTROLS:
            spread = None if samples is None else interval(samples[TRAINED] - samples[control])
            found[control] = (means[TRAINED] - means[control], spread)
        return found

    @property
    def greedy_equal(self) -> bool:
        """Whether every decoded text is plain greedy decoding's, near-ties aside."""
        return all(comparison.equal for comparison in self.comparisons)

    @property
    def near_ties(self) -> int:
        """Tokens of equal texts that differ by a near-tie."""
        return sum(comparison.near_ties for comparison in self.comparisons)

    @property
    def mismatches(self) -> list[dict[str, Any]]:
        """Prompts whose text is not greedy's: id, first differing new token, logit gap."""
        return [
            {"prompt": prompt_id, "position": comparison.position, "gap": comparison.gap}
            for prompt_id, comparison in zip(self.prompt_ids, self.comparisons, strict=True)
            if not comparison.equal
        ]

    def histogram(self, method: str) -> list[int]:
        """Draft steps that produced 1, 2, .. `num_proposals` + 1 tokens."""
        produced = [step.produced for text in self.steps[method] for step in text]
        return np.bincount(produced, minlength=self.num_proposals + 2)[1:].tolist()

    def slot_acceptance(self, method: str) -> list[float | None]:
        """Share of draft steps whose first k proposals were all accepted, k = 1, 2, ..

        Of the steps that proposed that many; None if none did.
        """
        steps = [step for text in self.steps[method] for step in text]
        rates: list[float | None] = []
        for slot in range(1, self.num_proposals + 1):
            asked = sum(step.proposed >= slot for step in steps)
            rates.append(sum(step.accepted >= slot for step in steps) / asked if asked else None)
        return rates

    def by_context(self) -> list[ContextBin]:
        """Acceptance by the position of the draft step's anchor, bins without any step left out."""
        totals: dict[int, dict[str, list[int]]] = {}
        for method, texts in self.steps.items():
            for length, text in zip(self.prompt_lengths, texts, strict=True):
                anchor = length  # the first new token: no draft step made it
                for step in text:
                    start = _bin_start(anchor)
                    entry = totals.setdefault(start, {m: [0, 0] for m in self.steps})[method]
                    entry[0] += 1
                    entry[1] += step.produced
                    anchor += step.produced
        return [
            ContextBin(
                start,
                2 * start or SHORTEST_CONTEXT,
                {m: steps for m, (steps, _) in totals[start].items()},
                {
                    m: produced / steps if steps else None
                    for m, (steps, produced) in totals[start].items()
                },
            )
            for start in sorted(totals)
        ]

    @property
    def truncated_prompts(self) -> int:
        """Prompts that lost tokens before they were read."""
        return sum(lost > 0 for lost in self.truncated_tokens)

    def to_json(self) -> dict[str, Any]:
        """All of it for `report.json`."""
        return {
            "accept_len": self.accept_len,
            "intervals": self.intervals,
            "differences": {
                control: {"mean": mean, "interval": spread}
                for control, (mean, spread) in self.differences.items()
            },
            "greedy_equal": self.greedy_equal,
            "near_ties": self.near_ties,
            "near_tie_gap": NEAR_TIE_GAP,
            "mismatches": self.mismatches,
            "prompts": len(self.prompt_ids),
            "prompt_tokens": sum(self.prompt_lengths),
            "truncated": {
                "prompts": self.truncated_prompts,
                "share": self.truncated_prompts / len(self.prompt_ids),
                "tokens": sum(self.truncated_tokens),
            },
            "block_size": self.block_size,
            "num_proposals": self.num_proposals,
            "max_new_tokens": self.max_new_tokens,
            "draft_steps": {m: int(self._counts(m).sum()) for m in self.steps},
            "histogram": {m: self.histogram(m) for m in self.steps},
            "slot_acceptance": {m: self.slot_acceptance(m) for m in self.steps},
            "by_context": [context_bin._asdict() for context_bin in self.by_context()],
            "per_prompt": [
                {
                    "id": prompt_id,
                    "prompt_tokens": self.prompt_lengths[i],
                    "accept_lengths": {
                        m: [step.produced for step in self.steps[m][i]] for m in self.steps
                    },
                }
                for i, prompt_id in enumerate(self.prompt_ids)
            ],
            "seconds": self.seconds,
        }

    def _produced(self, method: str) -> Any:
        return np.array([sum(s.produced for s in text) for text in self.steps[method]])

    def _counts(self, method: str) -> Any:
        return np.array([len(text) for text in self.steps[method]])

    @property
    def _can_resample(self) -> bool:
        return int(np.count_nonzero(self._counts(TRAINED))) > 1

    def _resampled(self) -> dict[str, Any]:
        # A prompt that the target ends with its first token has no draft step for any method.
        counts = np.stack([self._counts(m) for m in self.steps])
        drafted = counts.min(axis=0) > 0
        tokens = np.stack([self._produced(m) for m in self.steps])
        samples = bootstrap_ratios(tokens[:, drafted], counts[:, drafted], seed=self.seed)
        return dict(zip(self.steps, samples, strict=True))


def _bin_start(anchor: int) -> int:
    return 0 if anchor < SHORTEST_CONTEXT else 1 << (anchor.bit_length() - 1)
