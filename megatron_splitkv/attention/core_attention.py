"""Split-KV as a Megatron core attention: the module that a layer spec names `core_attention`."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_splitkv.attention.api import (
    context_parallel_attention,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.general import row_attention
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.packed_seq_params import SplitKVPackedSeqParams
from megatron_splitkv.attention.visibility import row_plan_of
from megatron_splitkv.config import CP_COMM_TYPES, KERNELS, ConfigError, require_choice
from megatron_splitkv.plan import ContextPlan, RowPlan, check_window


class SplitKVCoreAttention(MegatronModule):
    """Attention to keys that are spread over the context-parallel ranks and stay there.

    Draft blocks attend as a `ContextPlan` says. Without one it is an ordinary core attention, for
    self- and cross-attention layers: what `visibility.row_plan_of` makes of the mask type, a key
    padding mask and packed sequences, or a `RowPlan` of the user's.

    Heads arrive already split over tensor parallelism. Dropout, biases, other masks, other
    softmaxes and the logit statistics of QK clipping are refused.

    Args:
        config: Megatron's configuration.
        layer_number: 1-based number of the layer.
        attn_mask_type: which keys a query sees where no plan says it.
        attention_type: ``cross``, or ``self`` for layers that cannot attend draft blocks.
        attention_dropout: dropout probability, `config.attention_dropout` if None; must be 0.
        softmax_scale: factor on the scores; ``1 / sqrt(head width)`` if None.
        cp_comm_type: the strategy, one of `megatron_splitkv.config.CP_COMM_TYPES`, or ``auto``, the
            quickest of each call by estimate; None, as Megatron passes without context parallelism,
            is ``splitkv``. All others are for draft blocks alone, and for layers of type ``cross``.
        pg_collection: process groups; `cp` is used if the configuration has context parallelism.
        kernel: the local attention kernel.
        options: what split-KV communicates; a layer of another strategy takes from it what is its
            own, so that layers can share one spec.
        block_window: W of draft blocks: a query at position p sees keys with p - k < W, and those
            of its own block up to itself; None for full attention. Ordinary layers take theirs from
            the configuration.

    Raises:
        ConfigError: an unknown `cp_comm_type`, or one of Megatron's own for an ordinary layer, or a
            feature that this attention does not have.

    Source:
        `_attention_mask` of the public package `dflash` (model.py), for `block_window`.
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
        options: SplitKVOptions = SplitKVOptions(),
        block_window: int | None = None,
        **_unused: Any,  # later Megatron versions pass more
    ) -> None:
        super().__init__(config=config)
        self.strategy = "splitkv" if cp_comm_type is None else cp_comm_type
        require_choice("--cp-comm-type", self.strategy, (*CP_COMM_TYPES, "auto"))
        if self.strategy != "splitkv" and attention_type != "cross":
            raise ConfigError(
                f"--cp-comm-type {self.strategy} of a self-attention layer is Megatron's own: "
                "leave it Megatron's core attention, or use splitkv"
            )
        require_choice("--attention-kernel", kernel, KERNELS)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout > 0:
            raise ConfigError(
                f"--attention-dropout {dropout} is not supported by splitkv; set it to 0"
            )
        if config.apply_query_key_layer_scaling:
            raise ConfigError("--apply-query-key-layer-scaling is not supported by splitkv")
        if config.qk_clip or config.log_max_attention_logit:
            raise ConfigError(
                "--qk-clip and --log-max-attention-logit need the largest logits, which splitkv "
                "does not keep"
            )
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
        self.options = options.of_strategy(self.strategy)
        # Encoders may run without context parallelism although the group is there.
        cp_group = getattr(pg_collection, "cp", None)
        self.cp_group = cp_group if config.context_parallel_size > 1 else None
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self.window = _window_of(config, layer_number)
        check_window(block_window)
        self.block_window = block_window

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
        """Attend this rank's query rows to all ranks' keys.

        Args:
            query: rows of this rank.
            key: this rank's keys; for draft blocks its context rows, then its own blocks' rows
                unless `block_key` is given.
            value: in the order of `key`.
            attention_mask: None or, without a plan, a key padding mask of this rank's keys.
            attn_mask_type: of this call; the layer's if None.
            attention_bias: must be None.
            packed_seq_params: a `SplitKVPackedSeqParams` with a plan, Megatron's own for packed
                sequences, or None.
            block_key: of draft blocks: keys of this rank's own blocks' rows; with it, nothing is
                joined or cut.
            block_value: their values.

        Shape:
            query ``[sq, b, np, hn]``, key and value ``[sk, b, ng, hn]`` -> ``[sq, b, np * hn]``;
            packed without the b; b is 1 for draft blocks.

        Raises:
            ConfigError: inputs that do not fit the plan or have none.
        """
        if attention_bias is not None:
            raise ConfigError("splitkv takes no attention bias")
        plan = getattr(packed_seq_params, "plan", None)
        if isinstance(plan, ContextPlan) or block_key is not None or block_value is not None:
            if attention_mask is not None:
                raise ConfigError("splitkv takes no attention mask: the plan says who sees what")
            return self._attend_blocks(
                query, key, value, block_key, block_value, plan_of(packed_seq_params)
            )
        if self.strategy != "splitkv":
            raise ConfigError(
                f"--cp-comm-type {self.strategy} is for draft blocks here, and no ContextPlan came "
                "with these queries; use splitkv, or a core attention of Megatron's"
            )
        if isinstance(plan, RowPlan):
            if attention_mask is not None:
                raise ConfigError("splitkv takes no attention mask: the plan says who sees what")
        elif isinstance(packed_seq_params, SplitKVPackedSeqParams):
            raise ConfigError(_NO_PLAN)
        else:
            plan = row_plan_of(
                query,
                key,
                attention_mask,
                self.attn_mask_type if attn_mask_type is None else attn_mask_type,
                packed_seq_params,
                self.cp_group,
            )
        return row_attention(
            query,
            key,
            value,
            plan,
            self.cp_group,
            kernel=self.kernel,
            softmax_scale=self.softmax_scale,
            window=self.window,
            options=self.options,
        )

    def _attend_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_key: torch.Tensor | None,
        block_value: torch.Tensor | None,
        plan: ContextPlan,
    ) -> torch.Tensor:
        """Draft blocks: `forward` with a `ContextPlan`."""
        if self.window is not None:
            raise ConfigError(
                f"--window-size {self.config.window_size} is not for draft blocks; their windows "
                "come from the drafter's own configuration"
            )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim != 4 or tensor.shape[1] != 1:
                raise ConfigError(
                    f"{name} has shape {tuple(tensor.shape)}, draft blocks are [rows, 1, heads, "
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
                window=self.block_window,
                options=self.options,
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
                strategy=self.strategy,
                kernel=self.kernel,
                softmax_scale=self.softmax_scale,
                window=self.block_window,
                options=self.options,
            )
        # [sq, np, hn] -> [sq, 1, np * hn]
        return out.flatten(1).unsqueeze(1)


_NO_PLAN = (
    "splitkv needs the plan of the micro-batch: pass packed_seq_params="
    "SplitKVPackedSeqParams(plan=...)"
)


def plan_of(packed_seq_params: PackedSeqParams | None) -> ContextPlan:
    """The plan of draft blocks that the parameters carry.

    Raises:
        ConfigError: there is none.
    """
    plan = getattr(packed_seq_params, "plan", None)
    if not isinstance(plan, ContextPlan):
        raise ConfigError(_NO_PLAN)
    return plan


def _window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """How many keys a query of the layer sees at most, its own included; None: no limit."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    before, after = config.window_size
    if after > 0 or before < -1:
        raise ConfigError(
            f"--window-size {config.window_size} is not supported by splitkv: only causal windows "
            "(w, 0), a query's own key and w before it"
        )
    return None if before == -1 else before + 1
