"""The whole DSpark drafter in plain torch: backbone of `naive_drafter`, the heads slot by slot.

Shares nothing with the package but the layout's meaning.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from tests.drafter.naive_drafter import logits_of, naive_hidden

Weights = Mapping[str, torch.Tensor]


def naive_dspark_logits(
    config: DSparkConfig,
    weights: Weights,
    head: torch.Tensor,
    hidden: torch.Tensor,
    tokens_before: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a block's last slot and its confidence, from the token before each slot's label.

    ``hidden [slots, d]`` are the backbone's outputs of the block's slots up to that one.
    """
    w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    rank = config.markov_rank
    state = torch.zeros(rank, dtype=hidden.dtype)
    for token, h in zip(tokens_before, hidden, strict=True):
        e = w1[token]
        latent = e
        if config.markov_head_type == "gated":
            raw = weights["markov_head.gate_proj.weight"] @ torch.cat([h, e])
            latent = torch.sigmoid(raw + weights["markov_head.gate_proj.bias"]) * e
        if config.markov_head_type == "rnn":
            raw = weights["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
            raw = raw + weights["markov_head.joint_proj.bias"]
            update, candidate = torch.sigmoid(raw[:rank]), torch.tanh(raw[rank : 2 * rank])
            latent = torch.tanh(raw[2 * rank :])
            state = update * state + (1 - update) * candidate
    confidence = weights["confidence_head.proj.weight"][0] @ torch.cat([h, e])
    confidence = confidence + weights["confidence_head.proj.bias"][0]
    return logits_of(config, head, h) + w2 @ latent, confidence


def naive_dspark_loss(
    config: DSparkConfig,
    weights: Weights,
    embedding: torch.Tensor,
    head: torch.Tensor,
    pack: Pack,
    layout: BlockLayout,
    features: torch.Tensor,
    final_hidden: torch.Tensor,
) -> tuple[torch.Tensor, float, list[int]]:
    """Sum of weighted losses over all blocks, sum of weights, and the tokens predicted."""
    anchor, slot, keep, hidden = naive_hidden(config, weights, embedding, pack, layout, features)
    token_ids = torch.as_tensor(pack.token_ids).long()
    numerator, total, predictions = hidden.sum() * 0.0, 0.0, []
    for row in range(0, slot.numel(), config.block_size):
        a = int(anchor[row])
        end = int(pack.cu_seqlens[np.searchsorted(pack.cu_seqlens, a, side="right")])
        for k in range(config.block_size if keep[row] else 0):
            at = a + k + 1
            if at >= end or not pack.loss_mask[at]:
                break  # what follows could not be drafted in one piece
            logits, confidence = naive_dspark_logits(
                config, weights, head, hidden[row : row + k + 1], token_ids[a:at].tolist()
            )
            taught = logits_of(config, head, final_hidden[at - 1]).softmax(-1)
            distance = (logits.softmax(-1) - taught).abs().sum()
            accept = 1 - distance.detach() / 2
            foreseen = torch.sigmoid(confidence)
            of_confidence = -(accept * foreseen.log() + (1 - accept) * (1 - foreseen).log())
            loss = (
                config.ce_weight * F.cross_entropy(logits, token_ids[at])
                + config.l1_weight * distance
                + config.confidence_weight * of_confidence
            )
            weight = math.exp(-k / config.loss_decay_gamma)
            numerator, total = numerator + weight * loss, total + weight
            predictions.append(int(logits.argmax()))
    return numerator, total, predictions
