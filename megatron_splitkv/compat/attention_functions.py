"""Attention functions of Transformer Engine and torch, in one form whatever their release.

Up to 2.14 Transformer Engine's backward demands the TE dtype of its gradients; from 2.15 on it
derives it, and both functions must be told the layout of outputs, which defaults to another one.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_splitkv.compat.signatures import require_parameters
from megatron_splitkv.config import ConfigError

_FUSED_ATTENTION = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_PER_CALL = (
    *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
    *("cu_seqlens_kv_padded", "q", "k", "v", "fake_dtype", "attn_scale"),
)
_PER_FORWARD_CALL = (*_PER_CALL, "rng_gen")
_PER_BACKWARD_CALL = (*_PER_CALL, "o", "d_o", "aux_ctx_tensors", "deterministic")


@dataclass(frozen=True)
class FusedAttention:
    """Transformer Engine's fused attention on ranges of rows (THD), whatever its version.

    Args:
        forward: ``(**per call) -> (out, [statistics, rng_state])``.
        backward: ``(**per call) -> [dq, dk, dv, ...]``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; importing it takes seconds and can still fail."""
    return importlib.util.find_spec("transformer_engine") is not None


def fused_attention() -> FusedAttention:
    """The installed Transformer Engine's fused attention, with all that stays the same given.

    Raises:
        ConfigError: it cannot be imported, or its functions have an unknown form.
    """
    try:
        functions = importlib.import_module(_FUSED_ATTENTION)
        dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    except Exception as error:  # a binary that does not fit torch or CUDA raises what it likes
        raise ConfigError(f"Transformer Engine cannot be imported: {error!r}") from error
    return bind_fused_attention(functions, dtypes)


def bind_fused_attention(functions: Any, dtypes: Any) -> FusedAttention:
    """Bind two functions of Transformer Engine to one form.

    Args:
        functions: a module with `fused_attn_fwd`, `fused_attn_bwd` and `FusedAttnBackend`.
        dtypes: from torch's dtypes to Transformer Engine's.

    Raises:
        ConfigError: the functions cannot be called with these keywords.
    """
    shared = {
        "fused_attention_backend": functions.FusedAttnBackend["F16_arbitrary_seqlen"],
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "attn_mask_type": "padding",
    }
    forward_only: dict[str, Any] = {"is_training": True}
    backward_only: dict[str, Any] = {}
    if "o_format" in inspect.signature(functions.fused_attn_fwd).parameters:
        forward_only["o_format"] = "thd"
        backward_only = {"o_format": "thd", "do_format": "thd", "dqkv_layout": "thd_thd_thd"}
    demands_dtype = "dqkv_dtype" in inspect.signature(functions.fused_attn_bwd).parameters

    def forward(**per_call: Any) -> Any:
        return functions.fused_attn_fwd(**shared, **forward_only, **per_call)

    def backward(**per_call: Any) -> Any:
        if demands_dtype:
            per_call["dqkv_dtype"] = dtypes[per_call["fake_dtype"]]
        return functions.fused_attn_bwd(**shared, **backward_only, **per_call)

    package = "the installed Transformer Engine"
    dtype_keyword = ("dqkv_dtype",) if demands_dtype else ()
    require_parameters(
        functions.fused_attn_fwd, (*shared, *forward_only, *_PER_FORWARD_CALL), package
    )
    require_parameters(
        functions.fused_attn_bwd,
        (*shared, *backward_only, *dtype_keyword, *_PER_BACKWARD_CALL),
        package,
    )
    return FusedAttention(forward, backward)


def flex_attention_with_lse() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """torch's `flex_attention`, returning its output and the natural log-sum-exp."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):  # torch 2.8
        return functools.partial(flex.flex_attention, return_lse=True)

    def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, extra = flex.flex_attention(*args, return_aux=flex.AuxRequest(lse=True), **kwargs)
        return out, extra.lse

    return attend
