"""What a Domino drafter is: DFlash's backbone and a head that reads the tokens drafted so far."""

from dataclasses import dataclass
from typing import ClassVar

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig


@dataclass(frozen=True)
class DominoConfig(DFlashConfig):
    """Architecture, block and loss of a Domino drafter.

    Args:
        emb_dim: e, inner width of the head that corrects logits.
        gru_hidden_dim: g, width of the recurrent state over a block's tokens.
        pure_draft_prefix_len: first proposals that the backbone makes alone.
        shift_label: slot k predicts the token behind it instead of its own.
        base_loss_decay_ratio: share of the training over which the weight of the backbone's own
            loss falls from one to zero.

    Raises:
        ConfigError: a value that no drafter can have.
    """

    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    base_loss_decay_ratio: float = 0.5

    kind: ClassVar[str] = "domino"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("emb_dim", "gru_hidden_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 <= self.pure_draft_prefix_len < self.num_proposals:
            raise ConfigError(
                f"pure_draft_prefix_len is {self.pure_draft_prefix_len}, it must be at least 0 "
                f"and below the {self.num_proposals} proposals of a block, or no slot is corrected"
            )
        if not 0 < self.base_loss_decay_ratio <= 1:
            raise ConfigError(
                f"base_loss_decay_ratio is {self.base_loss_decay_ratio}, it must be in (0, 1]"
            )

    @property
    def label_shift(self) -> int:
        """1 with `shift_label`."""
        return int(self.shift_label)

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """The recurrence over a block's tokens and the correction of its logits."""
        d, e, g = self.hidden_size, self.emb_dim, self.gru_hidden_dim
        return {
            "prefix_gru.weight_ih_l0": (3 * g, d),
            "prefix_gru.weight_hh_l0": (3 * g, g),
            "embed_proj.0.weight": (e, d + g),
            "embed_proj.2.weight": (self.vocab_size, e),
        }
