"""What a feature store says about itself: the target, the tapped layers, the dtype."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.shard import FEATURE_DTYPES

# The newest schema that is read. A store is written with the oldest that can say what it holds:
# 1, or 2 with the target's final hidden states, or 3 without features.
SCHEMA_VERSION = 3


@dataclass(frozen=True)
class TargetInfo:
    """The target model as far as a drafter's training has to know it.

    Args:
        id: name of the target, for people.
        checksum: SHA-256 over its weights: two stores belong together only if it is equal.
        num_layers: decoder layers.
        hidden_size: d, the width of a tapped layer output.
        vocab_size: rows of the embedding.
        mask_token_id: an existing, unused row of the embedding that stands for "to be drafted".
        eos_token_ids: ids that end a response.
        pad_token_id: id that fills a batch, if the tokenizer has one.
    """

    id: str
    checksum: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None


@dataclass(frozen=True)
class StoreMeta:
    """Target, tapped layers and dtype of one store.

    Args:
        target: the model whose layers were tapped.
        target_layer_ids: 0-based layer outputs, ascending; empty exactly in token stores.
        dtype: dtype of the features on disk, ``float32`` or ``bfloat16``.
        final_hidden: whether the store also holds the rows that the target's head reads, behind
            its final norm: what the target itself would have said is the head of them.
        has_features: False for a token store, see `tokens_only`.

    Raises:
        ConfigError: a tapped layer that the target does not have, a mask token that is outside
            the vocabulary or in use, an unknown dtype, or a token store with taps or final hidden
            states.
    """

    target: TargetInfo
    target_layer_ids: tuple[int, ...]
    dtype: str = "float32"
    final_hidden: bool = False
    has_features: bool = True

    def __post_init__(self) -> None:
        if self.has_features:
            check_target_layer_ids(self.target_layer_ids, self.target.num_layers)
        elif self.target_layer_ids or self.final_hidden:
            raise ConfigError(
                f"a token store holds no states of its target: target layers "
                f"{list(self.target_layer_ids)} and final hidden states belong in a feature store"
            )
        check_mask_token(self.target)
        if self.dtype not in FEATURE_DTYPES:
            raise ConfigError(
                f"feature dtype {self.dtype!r} is not known; choose one of: "
                f"{', '.join(FEATURE_DTYPES)}"
            )

    @classmethod
    def tokens_only(cls, target: TargetInfo) -> Self:
        """Of a token store: ids and loss masks, for training with the target in the job."""
        return cls(target, (), has_features=False)

    @property
    def feature_width(self) -> int:
        """C * d, the numbers in one row of features; 0 in a token store."""
        return len(self.target_layer_ids) * self.target.hidden_size

    @property
    def final_width(self) -> int:
        """d where the store holds final hidden states, else 0."""
        return self.target.hidden_size if self.final_hidden else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token on disk: its states, its int32 id, its uint8 loss mask."""
        return (self.feature_width + self.final_width) * FEATURE_DTYPES[self.dtype].itemsize + 5

    @property
    def schema_version(self) -> int:
        """The oldest schema that can say what the store holds."""
        if not self.has_features:
            return 3
        return 2 if self.final_hidden else 1

    def to_json(self) -> dict[str, Any]:
        """The part of index.json that describes the store."""
        values = asdict(self)
        if self.schema_version < 3:
            del values["has_features"]
        if self.schema_version < 2:
            del values["final_hidden"]
        return values

    @classmethod
    def from_json(cls, index: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        target = dict(index["target"])
        target["eos_token_ids"] = tuple(target["eos_token_ids"])
        return cls(
            TargetInfo(**target),
            tuple(index["target_layer_ids"]),
            index["dtype"],
            bool(index.get("final_hidden", False)),
            bool(index.get("has_features", True)),
        )


def default_target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spread taps from the second layer to the fourth last one.

    Args:
        num_layers: N, decoder layers of the target.
        num_taps: C, how many layers to tap.

    Returns:
        ``round(1 + i (N - 4) / (C - 1))``, or the middle layer for one tap.

    Raises:
        ConfigError: the target is too shallow for that many different taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    span = num_layers - 4
    ids = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if span < 0 or len(set(ids)) != num_taps:
        raise ConfigError(
            f"{num_taps} taps do not fit between layers 1 and {num_layers - 3} of a target with "
            f"{num_layers} layers; tap fewer or name them with --target-layer-ids"
        )
    return ids


def spread_target_layer_ids(num_layers: int, most_taps: int = 5) -> tuple[int, ...]:
    """`default_target_layer_ids` with as many taps as a shallow target has room for.

    Args:
        num_layers: N, decoder layers of the target.
        most_taps: how many layers to tap in a deep one.
    """
    return default_target_layer_ids(num_layers, max(1, min(most_taps, num_layers - 3)))


def check_target_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse taps that the target does not have, repeated taps, and taps out of order."""
    if not target_layer_ids:
        raise ConfigError("no target layer is tapped; name at least one with --target-layer-ids")
    for layer_id in target_layer_ids:
        if not 0 <= layer_id < num_layers:
            raise ConfigError(
                f"target layer {layer_id} does not exist: the target has {num_layers} layers, ids "
                f"are 0-based layer outputs 0..{num_layers - 1}"
            )
    if list(target_layer_ids) != sorted(set(target_layer_ids)):
        raise ConfigError(
            f"target layer ids {list(target_layer_ids)} must ascend without repetition"
        )


def check_mask_token(target: TargetInfo) -> None:
    """Refuse a mask token outside the vocabulary or one that already means something."""
    mask = target.mask_token_id
    if not 0 <= mask < target.vocab_size:
        raise ConfigError(
            f"mask token {mask} is outside the vocabulary of {target.vocab_size}; choose an "
            "existing, unused id with --mask-token-id"
        )
    if mask == target.pad_token_id or mask in target.eos_token_ids:
        role = "pad" if mask == target.pad_token_id else "end-of-sequence"
        raise ConfigError(
            f"mask token {mask} is the {role} token; choose an unused id with --mask-token-id"
        )
