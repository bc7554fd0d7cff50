"""One drafter layer: DFlash attention in the place of self-attention, then Megatron's MLP."""

from typing import Any

import torch
from megatron.core.transformer import TransformerLayer

from megatron_splitkv.attention import SplitKVPackedSeqParams


class DFlashLayer(TransformerLayer):
    """A Megatron transformer layer whose attention reads `context` beside its own rows.

    Only the draft rows are normed, carry the residual and go through the MLP. The context is the
    same in every layer and is passed on untouched.
    """

    def _forward_attention(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: SplitKVPackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention with its norm and residual; called by Megatron's `forward`.

        Shape:
            ``hidden_states [Q, 1, d]``, ``context [S, 1, d]``, ``rotary_pos_emb [rows, hd]``.
        """
        attention_output = self.self_attention(
            self.input_layernorm(hidden_states),
            key_value_states=context,
            rotary_cos_sin=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        with self.bias_dropout_add_exec_handler():
            add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
            hidden_states = add(attention_output, hidden_states, self.hidden_dropout)
        return hidden_states, context
