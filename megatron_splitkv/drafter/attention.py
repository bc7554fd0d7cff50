"""DFlash attention: a block's queries over the context and over the block itself.

Shape legend: S context rows and Q own draft rows of this CP rank (Q = blocks x slots), d hidden
size, n_q query heads and n_kv key/value heads of this TP rank, hd head width; the 1 is Megatron's
batch dimension.
"""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType

from megatron_splitkv.attention import (
    SplitKVOptions,
    SplitKVPackedSeqParams,
    split_context_parallel_attention,
)
from megatron_splitkv.attention.core_attention import plan_of
from megatron_splitkv.attention.kernels import Kernel, select_kernel
from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.attention.placement import Places, choose_places
from megatron_splitkv.attention.strategies import SplitKVAttention, check_heads
from megatron_splitkv.comm import ranks_on_node
from megatron_splitkv.drafter.rope import apply_rotary
from megatron_splitkv.plan import AttentionPlan


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

    The steps of split-KV are taken apart here: queries travel while keys and values are projected,
    may be gathered before their projection, and outputs scattered behind theirs. Other strategies
    take projected tensors. `core_attention` says which strategy and kernel, what travels, and how
    far back a query sees.

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
        self.strategy: str = self.core_attention.strategy
        if self.strategy == "a2a":
            check_heads(
                self.num_attention_heads_per_partition,
                self.num_query_groups_per_partition,
                config.context_parallel_size,
            )
        self.options: SplitKVOptions = self.core_attention.options
        if self.checkpoint_core_attention:
            # What Megatron calls recomputing core attention: nothing gathered is kept. The kernel
            # itself need not run again, it goes backward from the log-sum-exp alone.
            self.options = replace(self.options, save="own").of_strategy(self.strategy)

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
            rotary_cos_sin: `drafter.rope.rotary_cos_sin` of the context rows, then the draft rows,
                then, if `places` gathers hidden rows, the draft rows of all ranks.
            packed_seq_params: carries the plan.

        Returns:
            Output of the projection, and the bias that Megatron adds later (None).

        Shape:
            ``hidden_states [Q, 1, d]``, ``key_value_states [S, 1, d]``,
            ``rotary_cos_sin [S + Q (+ P * Q), hd]``; the output ``[Q, 1, d]``.
        """
        context_rotary, block_rotary, all_rotary = rotary_cos_sin.tensor_split(
            [len(key_value_states), len(key_value_states) + len(hidden_states)]
        )
        plan = plan_of(packed_seq_params)
        scale, window = self.core_attention.softmax_scale, self.core_attention.block_window
        if self.strategy != "splitkv":
            key, value, block_key, block_value = self._keys(
                key_value_states, hidden_states, context_rotary, block_rotary
            )
            merged = split_context_parallel_attention(
                self._project_query(hidden_states, block_rotary).squeeze(1),
                key,
                value,
                block_key,
                block_value,
                plan,
                self.core_attention.cp_group,
                strategy=self.strategy,
                kernel=self.core_attention.kernel,
                softmax_scale=scale,
                window=window,
                options=self.options,
            )
            return self.linear_proj(merged.flatten(1).unsqueeze(1))
        places = self.places(plan, hidden_states)
        attention = SplitKVAttention(
            plan,
            self.core_attention.cp_group,
            hidden_states.device,
            kernel=self._kernel(hidden_states),
            softmax_scale=self.hidden_size_per_attention_head**-0.5 if scale is None else scale,
            window=window,
            options=self.options,
        )
        # Queries travel while keys and values are projected; backward, dq while they go back.
        if places.gather == "q":
            flight = attention.launch(self._project_query(hidden_states, block_rotary).squeeze(1))
        else:
            own = tensor_parallel.copy_to_tensor_model_parallel_region(
                hidden_states, group=self.tp_group
            )
            flight = attention.launch(own.squeeze(1), label="hidden")
        keys = self._keys(key_value_states, hidden_states, context_rotary, block_rotary)
        queries = (
            flight
            if places.gather == "q"
            else self._project_landed(flight.land(), attention.attended(all_rotary))
        )
        if places.scatter == "heads":
            merged = attention.attend(queries, *keys)
            return self.linear_proj(merged.flatten(1).unsqueeze(1))
        # Summed over context parallelism first: then tensor parallelism sums own rows only.
        shares = F.linear(
            attention.attend_partial(queries, *keys).flatten(1), self.linear_proj.weight
        )
        summed = attention.return_rows(shares).unsqueeze(1)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(
            summed, group=self.tp_group
        ), None

    @property
    def communication(self) -> str:
        """Strategy, options and levels, in words that are equal on ranks that fit together."""
        return f"{self.strategy} {self.options} over {self.node_ranks} ranks a node"

    @property
    def node_ranks(self) -> int:
        """Ranks of the group on each of several nodes; 1 where partial results take one level."""
        return ranks_on_node(self.core_attention.cp_group, self.options.ranks_per_node)

    def places(self, plan: AttentionPlan, like: torch.Tensor) -> Places:
        """Where this layer gathers queries and scatters outputs for a micro-batch.

        Args:
            plan: of the micro-batch.
            like: any tensor of the device and dtype of the activations.

        Returns:
            Under another strategy than split-KV: between the projections.
        """
        if self.strategy != "splitkv":
            return Places("q", "heads", f"attention communicates by {self.strategy}")
        return choose_places(
            self.options,
            LayerShape(
                query_rows=plan.num_blocks * plan.block_size,
                context_rows=sum(plan.num_rows(rank) for rank in range(plan.cp_size)),
                cp_size=plan.cp_size,
                heads=self.num_attention_heads_per_partition,
                kv_heads=self.num_query_groups_per_partition,
                head_width=self.hidden_size_per_attention_head,
                hidden_size=self.config.hidden_size,
                itemsize=like.element_size(),
                node_ranks=self.node_ranks,
            ),
            self.options.links_on(like.device.type),
        )

    def get_query_key_value_tensors(self, *_: Any, **__: Any) -> NoReturn:
        """Megatron's hook for one key and one value tensor, which this attention never makes."""
        raise NotImplementedError("context and block rows are projected apart, see forward")

    def _kernel(self, like: torch.Tensor) -> Kernel:
        width = self.hidden_size_per_attention_head
        queries = like.new_empty(0, self.num_attention_heads_per_partition, width)
        return select_kernel(
            self.core_attention.kernel, queries, self.num_query_groups_per_partition
        )

    def _project_query(self, hidden_states: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        query = self._heads(self.linear_q(hidden_states)[0])  # [Q, 1, n_q, hd]
        return apply_rotary(self.q_layernorm(query), rotary)

    def _project_landed(self, hidden_states: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Queries of rows of all ranks; their gradient is summed over tensor parallelism later."""
        projected = F.linear(hidden_states, self.linear_q.weight).unsqueeze(1)
        query = self.q_layernorm(self._heads(projected))
        return apply_rotary(query, rotary).squeeze(1)

    def _project_key_value(
        self, states: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        per_head = self._heads(self.linear_kv(states)[0], 2)  # [rows, 1, n_kv, 2 * hd]
        key, value = per_head.chunk(2, dim=-1)  # views: the value is never copied
        return apply_rotary(self.k_layernorm(key), rotary), value

    def _keys(
        self,
        context: torch.Tensor,
        blocks: torch.Tensor,
        context_rotary: torch.Tensor,
        block_rotary: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Keys and values of the context, then of the own blocks' rows, ``[rows, n_kv, hd]``."""
        key, value = self._project_key_value(context, context_rotary)
        block_key, block_value = self._project_key_value(blocks, block_rotary)
        return [x.squeeze(1) for x in (key, value, block_key, block_value)]

    def _heads(self, projected: torch.Tensor, width: int = 1) -> torch.Tensor:
        size = width * self.hidden_size_per_attention_head
        return projected.view(*projected.shape[:2], projected.shape[2] // size, size)
