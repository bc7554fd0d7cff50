"""What a DFlash drafter is, without Megatron: shapes, tapped layers, block, published sizes."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.meta import (
    TargetInfo,
    check_mask_token,
    check_target_layer_ids,
)
from megatron_splitkv.drafter.presets import PRESETS
from megatron_splitkv.plan.band import check_window
from megatron_splitkv.plan.checks import check_int

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Training writes it beside its checkpoints, export reads it there.
DRAFTER_CONFIG_FILE = "drafter_config.json"
# The key in it that names the kind of drafter; files without it are of DFlash drafters.
KIND_KEY = "drafter"

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
LOSS_WEIGHTS = ("decay", "dpace")


@dataclass(frozen=True)
class DFlashConfig:
    """Architecture and block of a DFlash drafter.

    Args:
        num_layers: drafter layers; need not equal the number of tapped layers.
        hidden_size: d, equal to the target's: embedding and head are the target's.
        ffn_hidden_size: width of the SwiGLU.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head; `hidden_size` need not be a multiple of it.
        vocab_size: V, rows of the target's embedding.
        num_target_layers: layers of the target.
        target_layer_ids: 0-based target layers whose outputs are the context, ascending.
        mask_token_id: an existing, unused row of the target's embedding.
        block_size: B, slots of a block: the anchor's token and B - 1 to draft.
        rope_theta: base of the rotary embedding.
        rms_norm_eps: epsilon of all norms.
        loss_decay_gamma: decay length of the slot weights.
        max_position_embeddings: longest document that the drafter is meant for.
        bos_token_id: the target's, for exported configurations.
        eos_token_ids: the target's; none of them may be the mask token.
        pad_token_id: the target's; may not be the mask token.
        layer_types: ``full_attention`` or ``sliding_attention`` of each layer; empty is full
            attention everywhere.
        sliding_window: W, a query of a sliding layer sees keys less than W positions before it, and
            none behind it in its own block. None without such layers.
        input_embedding_scale: what the target multiplies its embeddings with; draft rows alike.
        final_logit_softcapping: c of the target's ``c tanh(logits / c)``; None without.
        loss_weights: what a slot weighs in the loss: ``decay`` with its distance, or ``dpace``, the
            acceptance that it can still earn.
        distillation_weight: share of the divergence from the target's distribution in the loss;
            labels have the rest.

    Raises:
        ConfigError: a value that no drafter can have.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    loss_decay_gamma: float = 7.0
    max_position_embeddings: int = 40960
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    input_embedding_scale: float = 1.0
    final_logit_softcapping: float | None = None
    loss_weights: str = "decay"
    distillation_weight: float = 0.0

    kind: ClassVar[str] = "dflash"

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        layer_types = tuple(self.layer_types) or (FULL_ATTENTION,) * self.num_layers
        object.__setattr__(self, "layer_types", layer_types)
        self._check_numbers()
        self._check_layer_types()
        self._check_loss()
        if self.block_size < 2:
            raise ConfigError(
                f"block_size is {self.block_size}, it must be at least 2: the anchor and a slot to "
                "draft"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embedding needs an even width")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key/value heads; use a divisor"
            )
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        check_mask_token(
            TargetInfo(
                id="",
                checksum="",
                num_layers=self.num_target_layers,
                hidden_size=self.hidden_size,
                vocab_size=self.vocab_size,
                mask_token_id=self.mask_token_id,
                eos_token_ids=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
            )
        )
        for name in ("block_size", "mask_token_id"):
            check_int(name, getattr(self, name), 0)
        for name in ("target_layer_ids", "eos_token_ids"):
            for value in getattr(self, name):
                check_int(name, value, 0)

    def _check_numbers(self) -> None:
        for name in _SIZES:
            check_int(name, getattr(self, name), 1)
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, it must be positive and finite"
                )
        cap = self.final_logit_softcapping
        if cap is not None and not 0 < cap < math.inf:
            raise ConfigError(
                f"final_logit_softcapping is {cap}, it must be positive and finite; leave it out "
                "if the target has none"
            )

    def _check_layer_types(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types names {len(self.layer_types)} layers, the drafter has "
                f"{self.num_layers}; name each, or none for full attention everywhere"
            )
        for layer_type in self.layer_types:
            require_choice("layer type", layer_type, (FULL_ATTENTION, SLIDING_ATTENTION))
        slides = SLIDING_ATTENTION in self.layer_types
        if slides and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(
                "layers with sliding attention need a sliding_window of at least 1, it is "
                f"{self.sliding_window}; set --sliding-window"
            )
        if slides:
            check_window(self.sliding_window)
        elif self.sliding_window is not None:
            raise ConfigError(
                f"sliding_window is {self.sliding_window}, but no layer slides; name the layers "
                f"that do in layer_types ({SLIDING_ATTENTION})"
            )

    def _check_loss(self) -> None:
        require_choice("loss_weights", self.loss_weights, LOSS_WEIGHTS)
        if not 0 <= self.distillation_weight <= 1:
            raise ConfigError(
                f"distillation_weight is {self.distillation_weight}, it must be in [0, 1]"
            )
        if self.kind != "dflash" and (self.loss_weights != "decay" or self.distillation_weight):
            raise ConfigError(
                f"loss_weights {self.loss_weights!r} with distillation_weight "
                f"{self.distillation_weight} is for dflash drafters; a {self.kind} drafter has a "
                "loss of its own, with weights that decay: leave both out"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of every layer, in tokens; None is full attention."""
        return tuple(
            self.sliding_window if layer_type == SLIDING_ATTENTION else None
            for layer_type in self.layer_types
        )

    @property
    def label_shift(self) -> int:
        """0: slot k predicts the token at its own position, slot 0 none. 1: the one behind it."""
        return 0

    @property
    def first_trained_slot(self) -> int:
        """The first slot that predicts a token."""
        return 1 - self.label_shift

    @property
    def num_proposals(self) -> int:
        """Tokens that a draft step proposes."""
        return self.block_size - self.first_trained_slot

    @property
    def needs_final_hidden(self) -> bool:
        """Whether training wants the target's final hidden states beside the tapped ones."""
        return self.distillation_weight > 0

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of what this kind of drafter adds to the backbone, by public names."""
        return {}

    @property
    def feature_width(self) -> int:
        """C * d, the numbers in one row of tapped target features."""
        return len(self.target_layer_ids) * self.hidden_size

    def num_parameters(self) -> int:
        """Trained parameters; the target's frozen embedding and head are not among them."""
        d, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys_and_values = 2 * self.num_key_value_heads * self.head_dim
        attention = d * (queries + keys_and_values) + queries * d + 2 * self.head_dim
        layer = attention + 3 * d * self.ffn_hidden_size + 2 * d
        heads = sum(math.prod(shape) for shape in self.head_shapes().values())
        return self.feature_width * d + d + self.num_layers * layer + d + heads

    @classmethod
    def preset(cls, target_name: str) -> Self:
        """Return the published drafter of a target.

        Args:
            target_name: one of `PRESETS`.

        Raises:
            ConfigError: unknown name; the message lists the known ones.
        """
        return cls(**PRESETS[require_choice("target", target_name, PRESETS)])

    def to_json(self) -> str:
        """Return the kind and the configuration as a JSON object, in the order of the fields."""
        return json.dumps({KIND_KEY: self.kind} | asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`; keys that are not the drafter's are left to others.

        For files of any kind of drafter there is `kinds.load_config`.

        Raises:
            ConfigError: not a JSON object, of another kind, a missing key, or an impossible value.
        """
        try:
            values = json.loads(text)
            if (kind := values.get(KIND_KEY, "dflash")) != cls.kind:
                raise ConfigError(f"the configuration is of a {kind} drafter, not of {cls.kind}")
            return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a drafter configuration: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: naming the file.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error

    def to_transformer_config(self, **overrides: Any) -> "TransformerConfig":
        """Return the Megatron configuration of this drafter.

        Args:
            **overrides: fields of `TransformerConfig`, e.g. parallel sizes, precision, recompute.

        Raises:
            ConfigError: the overrides ask for something that the drafter does not do.
        """
        # Megatron is imported where it is used, so that the configuration travels without it.
        from megatron_splitkv.drafter.transformer_config import build_transformer_config

        return build_transformer_config(self, overrides)


_POSITIVE = ("rope_theta", "rms_norm_eps", "loss_decay_gamma", "input_embedding_scale")
_SIZES: Sequence[str] = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
)
