"""The points of the quality study and how much is done for each.

Source:
    Split-KV paper, Appendix A: S is the number of tokens to which a sample is cut on the right,
    Q the anchors of a sample times the block size; all points take the same steps of as many
    samples, and the point with the longest samples and the third anchor budget belongs to both
    studies.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_splitkv.config import ConfigError

FIX_Q, FIX_S = "fix_q_scale_s", "fix_s_scale_q"
_SHARED_BUDGET = 2  # index of the anchor budget at which the studies meet, as in the paper
_MOST_TOKENS = 1 << 16
_EPOCHS = 6  # as in the paper, where the samples allow it
_MOST_PACKS = 64  # the target has to speak them all
# Of two idle cores and the default shape: the share of the minutes in which drafters are trained,
# what a minute gives, what starting a job takes, and the target's steps for each minute in all.
_TRAINING_SHARE = 0.7
_STEPS_A_MINUTE = 260.0
_START_MINUTES = 0.3
_TARGET_STEPS = 50.0


@dataclass(frozen=True)
class Point:
    """One drafter of the study.

    Args:
        context: S, tokens to which a training sample is cut.
        anchors: draft blocks of a sample.
    """

    context: int
    anchors: int

    @property
    def name(self) -> str:
        """Of its folder and in reports."""
        return f"s{self.context}-n{self.anchors}"


@dataclass(frozen=True)
class QualityShape:
    """What is trained and measured.

    A sample is a row of turns: `real` bytes of text, then `spoken` ones that the target says
    greedily after all that stands before; the drafter learns what the target said. (Short turns,
    because a small model that listens to itself for long repeats itself.)

    Args:
        contexts: S of the Fix Q points, ascending, multiples of a turn.
        anchors: draft blocks a sample of the Fix S points, ascending.
        steps: optimizer steps of every drafter.
        target_steps: optimizer steps of the target.
        documents: samples of the training store, every one in each epoch.
        samples: of one step.
        held_out: samples that no one trains on; each gives one prompt for every context.
        real: bytes of text in a turn.
        spoken: bytes of the target in a turn, and new tokens of a prompt.
        block_size: B.
        layers: of the drafter.
        learning_rate: peak of the drafter's.
        ranks: that train a drafter together, context-parallel.
        seed: of the target, the text, the anchors and the drafter's weights.

    Raises:
        ConfigError: sizes that do not fit each other.
    """

    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    anchors: tuple[int, ...] = (8, 16, 32, 64)
    steps: int = 600
    target_steps: int = 600
    documents: int = 512
    samples: int = 8
    held_out: int = 48
    real: int = 32
    spoken: int = 32
    block_size: int = 8
    layers: int = 2
    learning_rate: float = 1.5e-3
    ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("contexts", "anchors"):
            values = getattr(self, name)
            if len(values) <= _SHARED_BUDGET or list(values) != sorted(set(values)):
                raise ConfigError(
                    f"{name} {list(values)} must be at least {_SHARED_BUDGET + 1} ascending numbers"
                )
        least = {"anchors": 1, "steps": 1, "target_steps": 1, "held_out": 2, "ranks": 1, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            value = min(value) if isinstance(value, tuple) else value
            if value < minimum:
                raise ConfigError(f"{name} {value} must be at least {minimum}")
        turn = self.real + self.spoken
        if wrong := [c for c in self.contexts if c < 1 or c % turn or c > _MOST_TOKENS]:
            raise ConfigError(
                f"contexts {wrong} must be multiples of a turn's {turn} tokens, at most "
                f"{_MOST_TOKENS:,}"
            )
        if self.documents < self.samples or self.documents % self.samples:
            raise ConfigError(
                f"documents {self.documents} must be a multiple of the {self.samples} samples of a "
                "step"
            )
        for point in self.points:
            if point.anchors > (most := self.candidates(point.context)):
                raise ConfigError(
                    f"a sample of {point.context} tokens has {most} places for anchors, not "
                    f"{point.anchors}; take fewer anchors or longer contexts"
                )

    @classmethod
    def for_minutes(cls, minutes: float, **sizes: Any) -> Self:
        """A study that takes about that long on two idle cores.

        Args:
            minutes: of the whole study.
            sizes: fields that are given, contexts and anchors among them; ``steps``,
                ``target_steps`` and ``documents`` override what follows from the minutes.
        """
        if not 0 < minutes < float("inf"):
            raise ConfigError(f"minutes {minutes} must be more than 0, and finite")
        points = len(cls(**{name: sizes[name] for name in ("contexts", "anchors")}).points)
        training = _TRAINING_SHARE * minutes / points - _START_MINUTES
        budget: dict[str, Any] = {
            "steps": max(20, int(_STEPS_A_MINUTE * training) // 10 * 10),
            "target_steps": min(3000, max(20, int(_TARGET_STEPS * minutes) // 10 * 10)),
        }
        budget |= sizes
        packs = max(1, min(_MOST_PACKS, round(budget["steps"] / _EPOCHS)))
        return cls(**{"documents": packs * cls.samples, **budget})

    @property
    def shared(self) -> Point:
        """The point of both studies."""
        return Point(self.contexts[-1], self.anchors[_SHARED_BUDGET])

    @property
    def studies(self) -> Mapping[str, tuple[Point, ...]]:
        """The points of each study, the scaled quantity ascending."""
        return {
            FIX_Q: tuple(Point(context, self.shared.anchors) for context in self.contexts),
            FIX_S: tuple(Point(self.shared.context, anchors) for anchors in self.anchors),
        }

    @property
    def points(self) -> tuple[Point, ...]:
        """All points, the shared one first and once."""
        return tuple(dict.fromkeys((self.shared, *self.studies[FIX_S], *self.studies[FIX_Q])))

    @property
    def length(self) -> int:
        """Tokens of an uncut sample."""
        return self.contexts[-1]

    def candidates(self, context: int) -> int:
        """Positions of a cut sample that can open a block: spoken, and a spoken one follows."""
        return context // (self.real + self.spoken) * (self.spoken - 1)

    def queries(self, point: Point) -> int:
        """Q, draft rows of a sample."""
        return point.anchors * self.block_size

    def to_json(self) -> dict[str, Any]:
        """All fields; tuples as lists."""
        fields = asdict(self)
        return fields | {name: list(fields[name]) for name in ("contexts", "anchors")}
