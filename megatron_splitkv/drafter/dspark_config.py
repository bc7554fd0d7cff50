"""What a DSpark drafter is: DFlash's backbone, a Markov head over tokens, a confidence head."""

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.drafter.config import DFlashConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Architecture, block and loss of a DSpark drafter; slot k predicts the token behind it.

    Args:
        markov_rank: r, rank of the bias that the previous token adds to the logits.
        markov_head_type: ``vanilla``, ``gated`` or ``rnn``.
        ce_weight: weight of the cross-entropy.
        l1_weight: weight of the distance to the target's distribution.
        confidence_weight: weight of the confidence head's loss.

    Raises:
        ConfigError: a value that no drafter can have.
    """

    block_size: int = 7
    loss_decay_gamma: float = 4.0
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0

    kind: ClassVar[str] = "dspark"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("markov_head_type", self.markov_head_type, MARKOV_HEADS)
        if self.markov_rank < 1:
            raise ConfigError(f"markov_rank is {self.markov_rank}, it must be at least 1")
        for name in ("ce_weight", "l1_weight", "confidence_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, it must be finite and not negative"
                )

    @property
    def label_shift(self) -> int:
        """Always 1."""
        return 1

    @property
    def needs_final_hidden(self) -> bool:
        """The target's distribution is taught."""
        return True

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """The Markov head and the confidence head."""
        d, r = self.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (self.vocab_size, r),
            "markov_head.markov_w2.weight": (self.vocab_size, r),
        }
        if self.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, d + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        if self.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + d)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
        return shapes | {
            "confidence_head.proj.weight": (1, d + r),
            "confidence_head.proj.bias": (1,),
        }
