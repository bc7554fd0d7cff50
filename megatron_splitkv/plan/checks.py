"""What a plan refuses, with one line that says how to mend it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan.band import check_window


def check_int(name: str, value: object, least: int) -> int:
    """`value` as a Python int; numpy's integers are accepted, bools are not.

    Raises:
        ConfigError: it is no integer, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} {value!r} must be at least {least}, and an int")
    return int(value)


def int_vector(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """`values` as int64; shapes are the caller's matter.

    Raises:
        ConfigError: they are no integers: what follows the point would get lost.
    """
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must hold integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def check_layout(layout: BlockLayout, context_length: int) -> None:
    """Refuse blocks that would see rows outside the context or of another document.

    Raises:
        ConfigError: a kept anchor does not lie in the context and in the document that it names.
    """
    starts, anchors = layout.document_starts, layout.anchor_positions
    if starts.size == 0:
        return
    anchors = np.where(layout.block_keep_mask, anchors, -1)
    change = np.flatnonzero(starts[1:] != starts[:-1]) + 1
    documents = starts[np.append(0, change)]
    if (documents[1:] > documents[:-1]).all():  # as packs have them
        last_anchors = np.maximum.reduceat(anchors, np.append(0, change))
    else:
        documents, document = np.unique(starts, return_inverse=True)
        last_anchors = np.full_like(documents, -1)
        np.maximum.at(last_anchors, document, anchors)
    ends = np.append(documents[1:], context_length)
    if documents[-1] > context_length:
        raise ConfigError(
            f"a document starts at {documents[-1]}, beyond the context of {context_length} rows"
        )
    if last_anchors.max() >= context_length:
        raise ConfigError(
            f"anchor {last_anchors.max()} lies beyond the context of {context_length} rows"
        )
    crossing = last_anchors >= ends
    if crossing.any():
        i = int(crossing.argmax())
        raise ConfigError(
            f"anchor {last_anchors[i]} does not lie in the document that starts at "
            f"{documents[i]}: another document starts between them"
        )


def check_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """The windows of the layers as a tuple.

    Raises:
        ConfigError: there is none, or one that hides a query from itself.
    """
    if isinstance(windows, str) or not isinstance(windows, Sequence) or not windows:
        raise ConfigError(
            f"windows {windows!r} must have an entry for every layer whose work is balanced: its "
            "window, or None for full attention"
        )
    for window in windows:
        check_window(window)
    return tuple(None if window is None else int(window) for window in windows)
