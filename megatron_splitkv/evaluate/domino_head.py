"""Domino's proposals: slot by slot, each knowing the ones before it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.evaluate.heads import vocabulary_logits


class DominoHead:
    """Greedy rollout of a Domino drafter, over several texts at once.

    The backbone's logits of all slots are one product; then slot after slot the GRU reads the token
    chosen last, and the slot's logits get the correction that follows from it. The first
    ``pure_draft_prefix_len`` proposals go without.

    Args:
        config: the drafter.
        tensors: of `DominoConfig.head_shapes`.

    Source: sgl-project/SpecForge, `specforge/modeling/draft/domino.py`, `_sample_draft_tokens`;
        sgl-project/sglang, `python/sglang/srt/speculative/domino_utils.py`,
        `domino_greedy_rollout`. Which slot reads what: `drafter.domino`.
    """

    def __init__(self, config: DominoConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._input_weight = tensors["prefix_gru.weight_ih_l0"]
        self._state_weight = tensors["prefix_gru.weight_hh_l0"]
        self._projection = tensors["embed_proj.0.weight"]
        self._correction = tensors["embed_proj.2.weight"]

    def propose(
        self,
        hidden: torch.Tensor,
        anchor_tokens: torch.Tensor,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        """See `ProposalHead.propose`."""
        drafted = hidden[:, self._config.first_trained_slot :]
        logits = vocabulary_logits(self._config, drafted, head)
        drafted = drafted.to(self._projection.dtype)
        state = drafted.new_zeros(drafted.shape[0], self._state_weight.shape[1])
        tokens, proposals = anchor_tokens, torch.empty_like(logits[..., 0], dtype=torch.int64)
        for i in range(drafted.shape[1]):
            state = self._read(F.embedding(tokens, embedding), state)
            slot = logits[:, i]
            if i >= self._config.pure_draft_prefix_len:
                rows = torch.cat([drafted[:, i], state], dim=1)
                slot = slot + F.linear(F.silu(F.linear(rows, self._projection)), self._correction)
            tokens = slot.argmax(dim=-1)
            proposals[:, i] = tokens
        return proposals

    def _read(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU's state after one more token."""
        embedded = embedded.to(state.dtype) * self._config.input_embedding_scale
        return torch.gru_cell(embedded, state, self._input_weight, self._state_weight)
