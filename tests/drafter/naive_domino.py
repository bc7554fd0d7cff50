"""The whole Domino drafter in plain torch: backbone of `naive_drafter`, the head slot by slot.

Shares nothing with the package but the layout's meaning. The GRU's equations are written out.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter.domino_config import DominoConfig
from tests.drafter.naive_drafter import logits_of, naive_hidden

Weights = Mapping[str, torch.Tensor]


def naive_domino_logits(
    config: DominoConfig,
    weights: Weights,
    embedding: torch.Tensor,
    head: torch.Tensor,
    hidden: torch.Tensor,
    tokens_before: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base and final logits of one slot, from the tokens between the anchor and its label."""
    base = logits_of(config, head, hidden)
    if len(tokens_before) <= config.pure_draft_prefix_len:
        return base, base
    state = torch.zeros(config.gru_hidden_dim, dtype=hidden.dtype)
    for token in tokens_before:
        state = _gru(weights, embedding[token] * config.input_embedding_scale, state)
    inner = F.silu(weights["embed_proj.0.weight"] @ torch.cat([hidden, state]))
    return base, base + weights["embed_proj.2.weight"] @ inner


def _gru(weights: Weights, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    reset_x, update_x, new_x = (weights["prefix_gru.weight_ih_l0"] @ x).chunk(3)
    reset_h, update_h, new_h = (weights["prefix_gru.weight_hh_l0"] @ state).chunk(3)
    update = torch.sigmoid(update_x + update_h)
    candidate = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (1 - update) * candidate + update * state


def naive_domino_loss(
    config: DominoConfig,
    weights: Weights,
    embedding: torch.Tensor,
    head: torch.Tensor,
    pack: Pack,
    layout: BlockLayout,
    features: torch.Tensor,
    base_weight: float,
) -> tuple[torch.Tensor, float, list[int]]:
    """Sum of weighted losses over all blocks, sum of weights, and the tokens predicted."""
    anchor, slot, keep, hidden = naive_hidden(config, weights, embedding, pack, layout, features)
    token_ids = torch.as_tensor(pack.token_ids).long()
    numerator, total, predictions = hidden.sum() * 0.0, 0.0, []
    for row in range(slot.numel()):
        a, k = int(anchor[row]), int(slot[row])
        end = int(pack.cu_seqlens[np.searchsorted(pack.cu_seqlens, a, side="right")])
        at = a + k + 1 if config.shift_label else a + k
        if not keep[row] or at == a or at >= end or not pack.loss_mask[at]:
            continue
        base, final = naive_domino_logits(
            config, weights, embedding, head, hidden[row], token_ids[a:at].tolist()
        )
        losses = [F.cross_entropy(logits, token_ids[at]) for logits in (final, base)]
        weight = math.exp(-(at - a - 1) / config.loss_decay_gamma)
        loss = (1 - base_weight) * losses[0] + base_weight * losses[1]
        numerator, total = numerator + weight * loss, total + weight
        predictions.append(int(final.argmax()))
    return numerator, total, predictions
