"""What a DFlash drafter is, without Megatron: shapes, tapped layers, block, published sizes."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_splitkv.config import ConfigError, require_choice
from megatron_splitkv.data.meta import (
    TargetInfo,
    check_mask_token,
    check_target_layer_ids,
    default_target_layer_ids,
)

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Training writes it beside its checkpoints, export reads it there.
DRAFTER_CONFIG_FILE = "drafter_config.json"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("rope_theta", "rms_norm_eps", "loss_decay_gamma"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be positive")
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
        return self.feature_width * d + d + self.num_layers * layer + d

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
        """Return the configuration as a JSON object, keys in the order of the fields."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`; keys that are not the drafter's are left to others.

        Raises:
            ConfigError: not a JSON object, a missing key, or an impossible value.
        """
        try:
            values = json.loads(text)
            return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        except (json.JSONDecodeError, TypeError) as error:
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

# The sizes of the published drafters; all layers attend to the full context.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "num_layers": 5,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_target_layers": 36,
        "target_layer_ids": default_target_layer_ids(36, 5),
        "mask_token_id": 151669,
        "bos_token_id": 151643,
        "eos_token_ids": (151645,),
        "pad_token_id": 151643,
    },
    "qwen3.5-35b-a3b": {
        "num_layers": 8,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 248320,
        "num_target_layers": 40,
        "target_layer_ids": default_target_layer_ids(40, 5),
        "mask_token_id": 248070,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
    },
    "qwen3.5-27b": {
        "num_layers": 5,
        "hidden_size": 5120,
        "ffn_hidden_size": 17408,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "num_target_layers": 64,
        "target_layer_ids": default_target_layer_ids(64, 5),
        "mask_token_id": 248070,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
    },
}
