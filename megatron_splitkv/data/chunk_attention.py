"""Attention of one chunk of a document to all tokens before it, in memory that stays the same.

Transformers' own PyTorch attention hands over a mask of (chunk x all tokens so far), and repeats
keys and values for grouped heads when there is a mask; both grow with the document. Here no mask
is made where attention is plainly causal: in 16 bits on CUDA the flash kernel aligns the causal
triangle with the end of the keys by itself, elsewhere the queries are taken in blocks, small
enough that the mask of one does not grow. Windowed layers keep their masks, which are as wide as
their caches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from megatron_splitkv.data.target import import_transformers

_NAME = "splitkv_chunk"
_MASK_ENTRIES = 1 << 22


@contextmanager
def bounded_attention(model: Any) -> Iterator[None]:
    """Let a target that uses PyTorch's attention use this file's, for a while.

    Targets with another implementation (``eager``, for soft caps or sinks that PyTorch's attention
    does not know) are left alone: their scores of a chunk grow with the document.

    Args:
        model: from `load_target`.
    """
    decoder = model.get_decoder()
    if decoder.config._attn_implementation != "sdpa":
        yield
        return
    _register()
    decoder.config._attn_implementation = _NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = "sdpa"


def _register() -> None:
    transformers = import_transformers()
    transformers.AttentionInterface.register(_NAME, _attend)
    transformers.AttentionMaskInterface.register(_NAME, _mask)


def _mask(*, mask_function: Any, allow_is_causal_skip: bool = True, **rest: Any) -> Any:
    """No mask where it is plainly causal, else what PyTorch's attention would get."""
    from transformers import masking_utils

    plain = mask_function is masking_utils.causal_mask_function
    if plain and allow_is_causal_skip and rest["attention_mask"] is None:
        return None
    return masking_utils.sdpa_mask(
        mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **rest
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    new, seen = query.shape[2], key.shape[2]
    if attention_mask is not None or new in (1, seen):
        sdpa = import_transformers().AttentionInterface()["sdpa"]
        output: tuple[torch.Tensor, None] = sdpa(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return output
    return end_aligned_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None


def end_aligned_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention whose last query sees every key.

    Args:
        query: of the newest tokens.
        key, value: of all tokens, with as many or fewer heads.
        scale: of the scores; ``head_size ** -0.5`` when None.

    Shape:
        query and result ``[batch, heads, new, head_size]``, key and value
        ``[batch, kv_heads, seen, head_size]``.
    """
    new, seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        bias: Any = causal_lower_right(new, seen)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped
        )
    positions = torch.arange(seen, device=query.device)
    blocks = [
        F.scaled_dot_product_attention(
            block,
            key,
            value,
            attn_mask=positions <= own[:, None],
            scale=scale,
            enable_gqa=grouped,
        )
        for block, own in zip(
            query.split(max(1, _MASK_ENTRIES // seen), dim=2),
            positions[seen - new :].split(max(1, _MASK_ENTRIES // seen)),
            strict=True,
        )
    ]
    return torch.cat(blocks, dim=2)
