"""The paper's study of drafter quality over query budget and context length, in small.

Seven drafters of one target, each trained by the package's real entry for the same number of
steps, and measured by real greedy speculative decoding of the same held-out prompts. What has
finished is never done again, so a study may be stopped and started at will.

Source:
    Appendix A of the Split-KV paper.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.bench.quality_data import prepare_quality, truncation
from megatron_splitkv.bench.quality_shape import Point, QualityShape
from megatron_splitkv.bench.timing import Interval
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.stages import Stages
from megatron_splitkv.data.target import Progress
from megatron_splitkv.data.text import TextFile

SHAPE_FILE, RESULT_FILE = "shape.json", "result.json"
_RESAMPLES = 10_000


@dataclass(frozen=True, eq=False)
class Scores:
    """What speculative decoding of the held-out prompts gave.

    Args:
        produced: tokens that draft steps produced, by held-out sample and context.
        draft_steps: draft steps, likewise.
        greedy_equal: every text was plain greedy decoding's, near-ties aside.
        near_ties: tokens that differ by a near-tie.
        ngram: acceptance length of n-gram repeat on the same texts: how repetitive they are.

    Shape:
        produced, draft_steps int64[held_out, contexts].
    """

    produced: NDArray[np.int64]
    draft_steps: NDArray[np.int64]
    greedy_equal: bool
    near_ties: int
    ngram: float

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        return {
            "produced": self.produced.tolist(),
            "draft_steps": self.draft_steps.tolist(),
            "greedy_equal": self.greedy_equal,
            "near_ties": self.near_ties,
            "ngram": self.ngram,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(
            np.array(content["produced"], dtype=np.int64),
            np.array(content["draft_steps"], dtype=np.int64),
            bool(content["greedy_equal"]),
            int(content["near_ties"]),
            float(content["ngram"]),
        )


class Train(Protocol):
    """Trains the drafter of a point, see `quality_training.train_drafter`."""

    def __call__(
        self, shape: QualityShape, point: Point, data: Path, checkpoints: Path, progress: Progress
    ) -> None: ...


class Measure(Protocol):
    """Exports a trained drafter and decodes the held-out prompts with it."""

    def __call__(
        self, shape: QualityShape, data: Path, checkpoints: Path, drafter: Path, progress: Progress
    ) -> Scores: ...


@dataclass(frozen=True, eq=False)
class QualityBenchmark:
    """What was measured.

    Args:
        shape: of the study.
        target: facts about the target.
        scores: of every point.
        seconds: wall seconds of every point: ``train`` and ``measure``.
    """

    shape: QualityShape
    target: dict[str, Any]
    scores: dict[Point, Scores]
    seconds: dict[Point, dict[str, float]]

    def accept_len(self, point: Point, context: int | None = None) -> Interval:
        """Tokens a draft step, with the 95 % bootstrap interval over held-out samples.

        Args:
            point: whose.
            context: of the prompts up to this context alone; of all when None.
        """
        return _interval(self._lengths(point, context))

    def difference(self, point: Point, base: Point) -> Interval:
        """Acceptance length of a point minus a base's, on the same resampled samples."""
        return _interval(self._lengths(point, None) - self._lengths(base, None))

    def ratio(self, point: Point, base: Point) -> Interval:
        """Acceptance length of a point over a base's, on the same resampled samples."""
        return _interval(self._lengths(point, None) / self._lengths(base, None))

    def gains(self, study: str) -> list[Interval]:
        """Differences of successive points of a study."""
        points = self.shape.studies[study]
        return [self.difference(new, old) for old, new in pairwise(points)]

    def span(self, study: str) -> float:
        """Largest minus smallest acceptance length of a study, over the smallest."""
        lengths = [self.accept_len(point).estimate for point in self.shape.studies[study]]
        return (max(lengths) - min(lengths)) / min(lengths)

    def truncation(self, context: int) -> dict[str, float]:
        """See `quality_data.truncation`."""
        return truncation(np.full(self.shape.documents, self.shape.length), context)

    @property
    def greedy_equal(self) -> bool:
        """Whether every text of every drafter was plain greedy decoding's."""
        return all(scores.greedy_equal for scores in self.scores.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers."""
        return {
            "benchmark": "quality",
            "shape": self.shape.to_json(),
            "target": self.target,
            "greedy_equal": self.greedy_equal,
            "studies": {
                study: {
                    "points": [point.name for point in points],
                    "span": self.span(study),
                    "gains": [vars(gain) for gain in self.gains(study)],
                }
                for study, points in self.shape.studies.items()
            },
            "points": {point.name: self._point_json(point) for point in self.shape.points},
        }

    def _point_json(self, point: Point) -> dict[str, Any]:
        return {
            "context": point.context,
            "anchors": point.anchors,
            "queries": self.shape.queries(point),
            **self.truncation(point.context),
            "accept_len": vars(self.accept_len(point)),
            "accept_len_by_context": {
                str(context): vars(self.accept_len(point, context))
                for context in self.shape.contexts
            },
            "seconds": self.seconds[point],
            **self.scores[point].to_json(),
        }

    def _lengths(self, point: Point, context: int | None) -> NDArray[np.float64]:
        """The acceptance length, then those of resampled samples, the same for every point."""
        scores = self.scores[point]
        at = slice(None) if context is None else [self.shape.contexts.index(context)]
        produced, steps = scores.produced[:, at].sum(axis=1), scores.draft_steps[:, at].sum(axis=1)
        count = produced.size
        generator = np.random.default_rng(self.shape.seed)
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
        drawn = np.concatenate([np.ones((1, count), dtype=drawn.dtype), drawn])
        lengths: NDArray[np.float64] = (drawn @ produced) / (drawn @ steps)
        return lengths


def bench_quality(
    shape: QualityShape,
    folder: Path,
    text: Callable[[], list[TextFile]],
    *,
    train: Train,
    measure: Measure,
    stages: Stages,
) -> QualityBenchmark:
    """Run the study, or what is left of it.

    Args:
        shape: of the study.
        folder: where everything is kept; a started study goes on there.
        text: gives the text for target and samples.
        train: trains a drafter.
        measure: exports and measures it.
        stages: clock and watcher.

    Raises:
        ConfigError: the folder holds a study of another shape, or a training failed.
    """
    _claim(shape, folder)
    data = folder / "data"
    data.mkdir(exist_ok=True)
    target = prepare_quality(shape, data, text, stages)
    scores: dict[Point, Scores] = {}
    seconds: dict[Point, dict[str, float]] = {}
    for number, point in enumerate(shape.points, start=1):
        place = folder / "points" / point.name
        result = place / RESULT_FILE
        if not result.is_file():
            stage = f"{number}/{len(shape.points)} {point.name}"
            checkpoints = place / "checkpoints"
            with stages.stage(f"{stage} train") as progress:
                train(shape, point, data, checkpoints, progress)
            with stages.stage(f"{stage} decode") as progress:
                found = measure(shape, data, checkpoints, place / "drafter", progress)
            took = {
                name: stages.seconds[f"{stage} {of}"]
                for name, of in (("train", "train"), ("measure", "decode"))
            }
            _write(result, {**found.to_json(), "seconds": took})
        content = json.loads(result.read_text())
        scores[point], seconds[point] = Scores.from_json(content), content["seconds"]
    return QualityBenchmark(shape, target, scores, seconds)


def _claim(shape: QualityShape, folder: Path) -> None:
    """Make the folder this study's.

    Raises:
        ConfigError: it is another one's.
    """
    file = folder / SHAPE_FILE
    ours = shape.to_json()
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, ours)
        return
    theirs = json.loads(file.read_text())
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"{folder} holds a study with {name} {theirs.get(name)}, not {value}; give the "
                "options of its first start, or another --output"
            )


def _interval(lengths: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(lengths[1:], [2.5, 97.5])
    return Interval(float(lengths[0]), float(low), float(high))


def _write(path: Path, content: Any) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)
