"""Split-KV as a Megatron core attention: the module that a layer spec names `core_attention`."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_splitkv.attention.api import (
    context_parallel_attention,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.packed_seq_params import SplitKVPackedSeqParams
from megatron_splitkv.config import CP_COMM_TYPES, KERNELS, ConfigError, require_choice
from megatron_splitkv.plan import ContextPlan


class SplitKVCoreAttention(MegatronModule):
    """Attention of draft blocks whose keys are spread over the context-parallel ranks by a plan.

    Heads arrive already split over tensor parallelism. Which keys a query sees is the plan's
    matter, so attention masks are refused.

    Args:
        config: Megatron's configuration.
        layer_number: 1-based number of the layer.
        attn_mask_type: accepted for the interface; the plan decides.
        attention_type: accepted for the interface.
        attention_dropout: dropout probability, `config.attention_dropout` if None; must be 0.
        softmax_scale: factor on the scores; ``1 / sqrt(head width)`` if None.
        cp_comm_type: the strategy, one of `megatron_splitkv.config.CP_COMM_TYPES`; None, as
            Megatron passes without context parallelism, is ``splitkv``.
        pg_collection: process groups; `cp` is used if the configuration has context parallelism.
        kernel: the local attention kernel.

    Raises:
        ConfigError: an unknown `cp_comm_type`, or a feature that this attention does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        kernel: str = "auto",
        **_unused: Any,  # later Megatron versions pass more
    ) -> None:
        super().__init__(config=config)
        self.strategy = "splitkv" if cp_comm_type is None else cp_comm_type
        require_choice("--cp-comm-type", self.strategy, CP_COMM_TYPES)
        require_choice("--attention-kernel", kernel, KERNELS)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout > 0:
            raise ConfigError(
                f"--attention-dropout {dropout} is not supported by splitkv; set it to 0"
            )
        if config.apply_query_key_layer_scaling:
            raise ConfigError("--apply-query-key-layer-scaling is not supported by splitkv")
        if config.window_size is not None:
            raise ConfigError(f"--window-size {config.window_size} is not supported by splitkv")
        if config.softmax_type != "vanilla":
            raise ConfigError(
                f"--softmax-type {config.softmax_type} is not supported by splitkv; use vanilla"
            )
        if config.context_parallel_size > 1 and getattr(pg_collection, "cp", None) is None:
            raise ConfigError(
                f"layer {layer_number}: pg_collection has no `cp` group although "
                f"context_parallel_size is {config.context_parallel_size}"
            )
        self.layer_number = layer_number
        self.kernel = kernel
        self.cp_group = getattr(pg_collection, "cp", None)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        block_key: torch.Tensor | None = None,
        block_value: torch.Tensor | None = None,
        **_unused: Any,  # later Megatron versions pass more
    ) -> torch.Tensor:
        """Attend this rank's blocks to all ranks' context and to themselves.

        Args:
            query: rows of this rank's own blocks.
            key: this rank's context rows, then its own blocks' rows unless `block_key` is given.
            value: in the order of `key`.
            attention_mask: must be None.
            attn_mask_type: ignored.
            attention_bias: must be None.
            packed_seq_params: a `SplitKVPackedSeqParams` with the plan.
            block_key: keys of this rank's own blocks' rows; with it, nothing is joined or cut.
            block_value: their values.

        Shape:
            query ``[sq, 1, np, hn]``, key and value ``[sk, 1, ng, hn]`` -> ``[sq, 1, np * hn]``.

        Raises:
            ConfigError: no plan, a batch dimension other than 1, a mask or a bias.
        """
        plan = _plan_of(packed_seq_params)
        if attention_mask is not None or attention_bias is not None:
            raise ConfigError(
                "splitkv takes no attention mask or bias: the plan says who sees what"
            )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim != 4 or tensor.shape[1] != 1:
                raise ConfigError(
                    f"{name} has shape {tuple(tensor.shape)}, splitkv takes [rows, 1, heads, "
                    "width]; pack the documents into one sequence (--micro-batch-size 1)"
                )
        if (block_key is None) != (block_value is None):
            raise ConfigError("block_key and block_value come together or not at all")
        if block_key is None or block_value is None:
            out = context_parallel_attention(
                query.squeeze(1),
                key.squeeze(1),
                value.squeeze(1),
                plan,
                self.cp_group,
                strategy=self.strategy,
                kernel=self.kernel,
                softmax_scale=self.softmax_scale,
            )
        else:
            out = split_context_parallel_attention(
                query.squeeze(1),
                key.squeeze(1),
                value.squeeze(1),
                block_key.squeeze(1),
                block_value.squeeze(1),
                plan,
                self.cp_group,
                kernel=self.kernel,
                softmax_scale=self.softmax_scale,
            )
        # [sq, np, hn] -> [sq, 1, np * hn]
        return out.flatten(1).unsqueeze(1)


def _plan_of(packed_seq_params: PackedSeqParams | None) -> ContextPlan:
    plan = getattr(packed_seq_params, "plan", None)
    if not isinstance(packed_seq_params, SplitKVPackedSeqParams) or plan is None:
        raise ConfigError(
            "splitkv needs the plan of the micro-batch: "
            "pass packed_seq_params=SplitKVPackedSeqParams(plan=...)"
        )
    return plan
