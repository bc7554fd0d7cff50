"""Batches of unequal texts in a transformers cache: rows that come, go, and shift.

Only keys and values are touched, layer by layer. A layer with a sliding window holds the last
W - 1 columns and counts those that it has seen; the others hold every column. Running states of
recurrent layers are copied and put back: they belong to one text and cannot be cropped.

Source: huggingface/transformers, `src/transformers/cache_utils.py` (5.24), `DynamicLayer` and
`DynamicSlidingWindowLayer`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_splitkv.config import ConfigError

_KNOWN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def can_hold_texts(cache: Any) -> bool:
    """Whether a cache holds keys and values only, so that texts of different lengths fit."""
    return all(type(layer).__name__ in _KNOWN_LAYERS for layer in cache.layers)


def is_recurrent(cache: Any) -> bool:
    """Whether a used cache holds running states, which cannot be cropped."""
    return any(
        state is not None
        for layer in _recurrent(cache)
        for state in layer.recurrent_states.values()
    )


def recurrent_states(cache: Any) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Copies of the running states of every recurrent layer, for `restore_states`."""
    return [
        # Convolution states are replaced when they grow, recurrent ones are overwritten.
        (dict(layer.conv_states), {i: state.clone() for i, state in layer.recurrent_states.items()})
        for layer in _recurrent(cache)
    ]


def restore_states(cache: Any, states: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    """Put the running states back; keys and values are the caller's to crop."""
    for layer, (conv, recurrent) in zip(_recurrent(cache), states, strict=True):
        layer.conv_states, layer.recurrent_states = dict(conv), recurrent


def _recurrent(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def append_rows(cache: Any, width: int, other: Any, other_width: int) -> None:
    """Append another cache's texts, all aligned at their ends.

    Args:
        cache: grows, in place.
        width: columns that it has seen.
        other: of the same model.
        other_width: columns that the other has seen.

    Raises:
        ConfigError: the cache holds more than keys and values; names the kind of layer.
    """
    if not can_hold_texts(cache):
        kinds = {type(layer).__name__ for layer in cache.layers} - set(_KNOWN_LAYERS)
        raise ConfigError(
            f"the target keeps a {min(kinds)} in its cache, which cannot hold texts of different "
            "lengths; use --batch-size 1"
        )
    for layer, new in zip(cache.layers, other.layers, strict=True):
        if not layer.is_initialized:
            continue
        columns = max(layer.keys.shape[-2], new.keys.shape[-2])
        layer.keys = torch.cat([_left_padded(side.keys, columns) for side in (layer, new)])
        layer.values = torch.cat([_left_padded(side.values, columns) for side in (layer, new)])
        _count(layer, max(width, other_width))


def keep_columns(cache: Any, texts: Sequence[int], drop: Sequence[int], width: int) -> None:
    """Keep some texts, without the last columns of each.

    Args:
        cache: changed in place.
        texts: those that stay, ascending.
        drop: columns to forget at the end of each of `texts`.
        width: length of the longest of `texts` afterwards.
    """
    for layer in _filled(cache):
        held = layer.keys.shape[-2]
        columns = min(width, _window(layer) - 1)
        # Negative where a text is shorter than the batch: padding, whatever column it repeats.
        first = held - columns - torch.tensor(drop, device=layer.keys.device)
        index = (first[:, None] + torch.arange(columns, device=first.device)).clamp(min=0)
        index = index[:, None, :, None]
        rows = slice(None) if len(texts) == layer.keys.shape[0] else list(texts)
        layer.keys = torch.take_along_dim(layer.keys[rows], index, dim=2)
        layer.values = torch.take_along_dim(layer.values[rows], index, dim=2)
        _count(layer, width)


def _filled(cache: Any) -> Iterator[Any]:
    """Layers with keys of their own; some models share another layer's."""
    return (layer for layer in cache.layers if layer.is_initialized)


def _window(layer: Any) -> int:
    return int(layer.sliding_window) if layer.is_sliding else 1 << 62


def _count(layer: Any, width: int) -> None:
    if layer.is_sliding:
        layer.cumulative_length = width


def _left_padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0, columns - tensor.shape[-2], 0))
