"""Anchors: the positions at which draft blocks open, drawn anew for every step.

The draw is keyed by (seed, step, sample id) and by nothing else, so that all ranks that share a
sample draw the same blocks whatever else has used a random generator, a resumed run repeats the
uninterrupted one, and a document keeps its anchors wherever the packer puts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError

_KEY_LIMIT = 2**63  # keys travel as int64 through samplers and tensors


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The draft blocks of one packed micro-batch, in global packed positions.

    Block `i` sees the context keys `document_starts[i] <= x < anchor_positions[i]` and all the
    slots of its own block. A padding block (`block_keep_mask` False) sees nothing and costs
    nothing. The arrays are copied: a layout never changes after it was made.

    Args:
        anchor_positions: packed position of slot 0 of every block.
        document_starts: packed position at which the document of every block begins.
        block_keep_mask: False for padding blocks.
        block_size: B, slots per block, slot 0 included.

    Shape:
        anchor_positions, document_starts int64[N]; block_keep_mask bool[N].

    Raises:
        ConfigError: shapes differ, a position is negative, or a kept anchor lies before its
            document.
    """

    anchor_positions: NDArray[np.int64]
    document_starts: NDArray[np.int64]
    block_keep_mask: NDArray[np.bool_]
    block_size: int

    def __post_init__(self) -> None:
        for name, dtype in (
            ("anchor_positions", np.int64),
            ("document_starts", np.int64),
            ("block_keep_mask", np.bool_),
        ):
            object.__setattr__(self, name, _vector(name, getattr(self, name), dtype).copy())
        object.__setattr__(self, "block_size", int(self.block_size))
        shapes = {self.anchor_positions.size, self.document_starts.size, self.block_keep_mask.size}
        if len(shapes) != 1:
            raise ConfigError(
                f"anchor_positions, document_starts and block_keep_mask have "
                f"{self.anchor_positions.size}, {self.document_starts.size} and "
                f"{self.block_keep_mask.size} entries; give one of each per block"
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size {self.block_size} must be at least 1")
        if self.num_blocks and min(self.anchor_positions.min(), self.document_starts.min()) < 0:
            raise ConfigError("anchor_positions and document_starts must not be negative")
        early = self.block_keep_mask & (self.anchor_positions < self.document_starts)
        if early.any():
            i = int(early.argmax())
            raise ConfigError(
                f"block {i}: anchor {self.anchor_positions[i]} lies before the start "
                f"{self.document_starts[i]} of its document"
            )

    @property
    def num_blocks(self) -> int:
        """N, padding blocks included."""
        return int(self.anchor_positions.size)

    def without_padding(self) -> Self:
        """The kept blocks alone, or one padding block if none is kept.

        Padding costs no attention, but its rows are gathered and go through every linear layer:
        a pack of many short documents would be mostly padding.
        """
        keep = self.block_keep_mask
        chosen = keep if keep.any() else np.arange(keep.size) == 0
        return replace(
            self,
            anchor_positions=self.anchor_positions[chosen],
            document_starts=self.document_starts[chosen],
            block_keep_mask=keep[chosen],
        )


def select_anchors(
    loss_mask: ArrayLike,
    cu_seqlens: ArrayLike,
    *,
    num_anchors: int,
    block_size: int,
    seed: int,
    step: int,
    sample_ids: Sequence[int] | NDArray[np.integer],
) -> BlockLayout:
    """Draw up to `num_anchors` anchors per document, uniformly and without replacement.

    A position `a` is a candidate if `loss_mask[a]` and `loss_mask[a + 1]` hold and both lie in the
    same document: slot 0 is then a supervised token and slot 1 has something to predict. A
    document with fewer candidates than `num_anchors` uses them all and is filled up with padding
    blocks at its start.

    Args:
        loss_mask: True where a token is supervised; may be longer than the documents.
        cu_seqlens: document bounds, `[0, ..., end of the last document]`.
        num_anchors: blocks per document.
        block_size: B, slots per block.
        seed: the run's seed.
        step: the key of the draw within the run, e.g. the index of the packed item.
        sample_ids: identity of every document in its data set.

    Returns:
        `len(sample_ids) * num_anchors` blocks: per document the kept anchors ascending, then its
        padding blocks. Nothing depends on the number of ranks.

    Shape:
        loss_mask bool[S]; cu_seqlens int64[D + 1]; sample_ids int64[D].

    Raises:
        ConfigError: malformed bounds, counts or keys.
    """
    mask = _vector("loss_mask", loss_mask, np.bool_)
    bounds = _vector("cu_seqlens", cu_seqlens, np.int64)
    samples = _vector("sample_ids", sample_ids, np.int64)
    if num_anchors < 1:
        raise ConfigError(f"num_anchors {num_anchors} must be at least 1 per document")
    if block_size < 2:
        raise ConfigError(f"block_size {block_size} must be at least 2: slot 0 predicts nothing")
    if bounds.size == 0 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ConfigError("cu_seqlens must begin at 0 and never decrease")
    if bounds[-1] > mask.size:
        raise ConfigError(f"cu_seqlens end at {bounds[-1]}, but loss_mask has {mask.size} entries")
    if samples.size != bounds.size - 1:
        raise ConfigError(
            f"{samples.size} sample_ids for {bounds.size - 1} documents; give one per document"
        )
    keys = {"seed": int(seed), "step": int(step)}
    if samples.size:
        keys |= {"sample id": int(samples.min())}
    for name, key in keys.items():
        if not 0 <= key < _KEY_LIMIT:
            raise ConfigError(f"{name} {key} must be in [0, 2**63)")

    supervised_pair = mask[:-1] & mask[1:]
    starts = np.repeat(bounds[:-1], num_anchors)
    anchors = starts.copy()
    keep = np.zeros(anchors.size, dtype=np.bool_)
    for document, (start, end) in enumerate(pairwise(bounds)):
        candidates = start + np.flatnonzero(supervised_pair[start : max(start, end - 1)])
        chosen = _choose(candidates, num_anchors, (seed, step, int(samples[document])))
        first = document * num_anchors
        anchors[first : first + chosen.size] = chosen
        keep[first : first + chosen.size] = True
    return BlockLayout(anchors, starts, keep, block_size)


def _choose(
    candidates: NDArray[np.int64], count: int, key: tuple[int, int, int]
) -> NDArray[np.int64]:
    """`count` of the candidates, ascending; a uniform subset that depends on `key` alone."""
    if candidates.size <= count:
        return candidates
    # Raw words of a bit generator are stable across numpy versions; Generator.choice is not.
    # The candidates with the smallest words are a uniform sample without replacement.
    words = np.array(key, dtype="<u8").view("<u4")
    draw = np.random.Philox(np.random.SeedSequence(words.tolist())).random_raw(candidates.size)
    return candidates[np.sort(np.argpartition(draw, count - 1)[:count])]


def _vector[Scalar: np.generic](
    name: str, values: ArrayLike, dtype: type[Scalar]
) -> NDArray[Scalar]:
    """`values` as a vector of `dtype`; refuses other ranks and lossy conversions."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ConfigError(f"{name} must be a vector, not of shape {array.shape}")
    if array.size and dtype is np.int64 and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must hold integers, not {array.dtype}")
    return array.astype(dtype, copy=False)
