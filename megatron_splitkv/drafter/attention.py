"""DFlash attention: a block's queries over the context and over the block itself.

Shape legend: S context rows and Q own draft rows of this CP rank (Q = blocks x slots), d hidden
size, n_q query heads and n_kv key/value heads of this TP rank, hd head width; the 1 is Megatron's
batch dimension.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType

from megatron_splitkv.attention import SplitKVPackedSeqParams
from megatron_splitkv.drafter.rope import apply_rotary


@dataclass
class DFlashAttentionSubmodules:
    """Modules of the attention, as classes or specs of Megatron's interfaces.

    Args:
        linear_q: column-parallel, rows are query heads.
        linear_kv: column-parallel, rows are ``[k | v]`` per key/value head, so that a TP shard
            holds whole heads of both.
        core_attention: attention over the split context; takes `block_key` and `block_value`.
        linear_proj: row-parallel output projection.
        q_layernorm: norm of each query head.
        k_layernorm: norm of each key head.
    """

    linear_q: Any
    linear_kv: Any
    core_attention: Any
    linear_proj: Any
    q_layernorm: Any
    k_layernorm: Any


class DFlashAttention(Attention):
    """Attention of draft rows to the context rows of all CP ranks and to their own block.

    Context and draft rows go through the same key/value projection one after the other and stay
    separate tensors: joining them would copy the context's keys and values in every layer.

    Args:
        config: Megatron's configuration.
        submodules: the parts.
        layer_number: 1-based.
        attn_mask_type: unused; visibility follows from the plan.
        cp_comm_type: how context parallelism communicates; checked by the core attention.
        pg_collection: process groups; `tp` and `cp` are used.
        **kwargs: what else Megatron's `Attention` takes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DFlashAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.no_mask,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="cross",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
            **kwargs,
        )
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "gather_output": False,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.linear_q = submodules.linear_q(
            config.hidden_size, self.query_projection_size, **linear
        )
        self.linear_kv = submodules.linear_kv(
            config.hidden_size, 2 * self.kv_projection_size, **linear
        )
        norm: dict[str, Any] = {
            "config": config,
            "hidden_size": self.hidden_size_per_attention_head,
            "eps": config.layernorm_epsilon,
        }
        self.q_layernorm = submodules.q_layernorm(**norm)
        self.k_layernorm = submodules.k_layernorm(**norm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor,
        rotary_cos_sin: torch.Tensor,
        packed_seq_params: SplitKVPackedSeqParams,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: normed draft rows of this rank's blocks.
            key_value_states: projected target features of this rank's context rows.
            rotary_cos_sin: `drafter.rope.rotary_cos_sin` of the context rows, then the draft rows.
            packed_seq_params: carries the plan.

        Returns:
            Output of the projection, and the bias that Megatron adds later (None).

        Shape:
            ``hidden_states [Q, 1, d]``, ``key_value_states [S, 1, d]``,
            ``rotary_cos_sin [S + Q, hd]``; the output ``[Q, 1, d]``.
        """
        num_context = key_value_states.shape[0]
        context_rotary, block_rotary = rotary_cos_sin[:num_context], rotary_cos_sin[num_context:]
        query = self._project_query(hidden_states, block_rotary)
        key, value = self._project_key_value(key_value_states, context_rotary)
        block_key, block_value = self._project_key_value(hidden_states, block_rotary)
        projected = (query, key, value, block_key, block_value)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            query, key, value, block_key, block_value = tensors
            return self.core_attention(
                query,
                key,
                value,
                None,
                attn_mask_type=self.attn_mask_type,
                attention_bias=None,
                packed_seq_params=packed_seq_params,
                block_key=block_key,
                block_value=block_value,
            )

        if self.checkpoint_core_attention and self.training:
            merged = tensor_parallel.checkpoint(attend, False, *projected)
        else:
            merged = attend(*projected)  # [Q, 1, n_q * hd]
        return self.linear_proj(merged)

    def get_query_key_value_tensors(self, *_: Any, **__: Any) -> NoReturn:
        """Megatron's hook for one key and one value tensor, which this attention never makes."""
        raise NotImplementedError("context and block rows are projected apart, see forward")

    def _project_query(self, hidden_states: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        query = self._heads(self.linear_q(hidden_states)[0])  # [Q, 1, n_q, hd]
        return apply_rotary(self.q_layernorm(query), rotary)

    def _project_key_value(
        self, states: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        per_head = self._heads(self.linear_kv(states)[0], 2)  # [rows, 1, n_kv, 2 * hd]
        key, value = per_head.chunk(2, dim=-1)  # views: the value is never copied
        return apply_rotary(self.k_layernorm(key), rotary), value

    def _heads(self, projected: torch.Tensor, width: int = 1) -> torch.Tensor:
        size = width * self.hidden_size_per_attention_head
        return projected.view(*projected.shape[:2], projected.shape[2] // size, size)
