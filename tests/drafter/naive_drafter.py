"""The whole drafter written down in plain torch: one process, dense mask, fp64, autograd.

Shares nothing with the package but the layout's meaning; reads the weights under the names of the
Megatron model, with TP shards already joined.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.drafter import DFlashConfig

Weights = Mapping[str, torch.Tensor]


def naive_drafter_loss(
    config: DFlashConfig,
    weights: Weights,
    embedding: torch.Tensor,
    head: torch.Tensor,
    pack: Pack,
    layout: BlockLayout,
    features: torch.Tensor,
    final_hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """Sum of weighted losses over all blocks, and the sum of weights.

    `final_hidden` are what the target's head reads, for a loss with distillation.
    """
    anchor, slot, keep, hidden = naive_hidden(config, weights, embedding, pack, layout, features)
    token_ids = torch.as_tensor(pack.token_ids).long()

    losses: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for row in range(slot.numel()):  # one slot at a time, as the contract reads
        a, k = int(anchor[row]), int(slot[row])
        end = int(pack.cu_seqlens[np.searchsorted(pack.cu_seqlens, a, side="right")])
        if not keep[row] or k == 0 or a + k >= end or not pack.loss_mask[a + k]:
            continue
        loss = cross_entropy = F.cross_entropy(
            logits_of(config, head, hidden[row]), token_ids[a + k]
        )
        if config.distillation_weight:
            assert final_hidden is not None
            log_q = logits_of(config, head, hidden[row]).log_softmax(0)
            # What the target says of position a + k, it says one position earlier.
            log_p = logits_of(config, head, final_hidden[a + k - 1]).log_softmax(0)
            share, kl = config.distillation_weight, (log_p.exp() * (log_p - log_q)).sum()
            loss = (1 - share) * cross_entropy + share * kl
        losses[row // config.block_size].append((k, loss, cross_entropy.detach()))

    numerator, total = hidden.sum() * 0.0, 0.0
    for block in losses.values():
        smoothed = [0.5 * math.exp(-float(cross_entropy)) + 0.5 for _, _, cross_entropy in block]
        for j, (k, loss, _) in enumerate(block):
            weight = math.exp(-(k - 1) / config.loss_decay_gamma)
            if config.loss_weights == "dpace":
                weight = sum(math.prod(smoothed[: m + 1]) for m in range(j, len(block)))
            numerator, total = numerator + weight * loss, total + weight
    return numerator, total


def logits_of(config: DFlashConfig, head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of rows, capped where the target caps its own."""
    logits = hidden @ head.T
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def naive_hidden(
    config: DFlashConfig,
    weights: Weights,
    embedding: torch.Tensor,
    pack: Pack,
    layout: BlockLayout,
    features: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Anchor, slot and keep of every draft row, and its final hidden state."""
    size = config.block_size
    start = torch.as_tensor(layout.document_starts).repeat_interleave(size)
    slot = torch.arange(size).repeat(layout.num_blocks)
    anchor = torch.as_tensor(layout.anchor_positions).repeat_interleave(size)
    keep = torch.as_tensor(layout.block_keep_mask).repeat_interleave(size)
    token_ids = torch.as_tensor(pack.token_ids).long()

    x = embedding[torch.where(keep & (slot == 0), token_ids[anchor], config.mask_token_id)]
    x = x * config.input_embedding_scale
    hidden = _decode(config, weights, x, features, pack, anchor, start, slot, keep)
    return anchor, slot, keep, hidden


def _decode(
    config: DFlashConfig,
    weights: Weights,
    x: torch.Tensor,
    features: torch.Tensor,
    pack: Pack,
    anchor: torch.Tensor,
    start: torch.Tensor,
    slot: torch.Tensor,
    keep: torch.Tensor,
) -> torch.Tensor:
    context = _norm(config, features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    where = torch.arange(len(features))
    bounds = torch.as_tensor(pack.cu_seqlens)
    document_start = bounds[torch.searchsorted(bounds, where, right=True) - 1]
    sees_context = (where >= start[:, None]) & (where < anchor[:, None])
    block = torch.arange(len(slot)) // config.block_size
    everywhere = torch.cat([sees_context, block[:, None] == block], dim=1) & keep[:, None]
    distance = (anchor + slot)[:, None] - torch.cat([where, anchor + slot])
    positions = torch.cat([where - document_start, anchor - start + slot])

    for i in range(config.num_layers):
        visible = everywhere
        if config.layer_types[i] == "sliding_attention":
            assert config.sliding_window is not None
            visible = everywhere & (distance >= 0) & (distance < config.sliding_window)
        w = {
            name.removeprefix(f"decoder.layers.{i}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{i}.")
        }
        normed = _norm(config, x, w["input_layernorm"])
        rows = torch.cat([context, normed])
        q = (normed @ w["self_attention.linear_q"].T).unflatten(-1, (-1, config.head_dim))
        kv = (rows @ w["self_attention.linear_kv"].T).unflatten(-1, (-1, 2 * config.head_dim))
        k, v = kv.chunk(2, dim=-1)
        q = _norm(config, q, w["self_attention.q_layernorm"])
        k = _norm(config, k, w["self_attention.k_layernorm"])
        q, k = _rope(config, q, positions[len(features) :]), _rope(config, k, positions)
        group = config.num_attention_heads // config.num_key_value_heads
        scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(group, 1))
        scores = scores / math.sqrt(config.head_dim)
        probability = scores.masked_fill(~visible[:, None], -1e30).softmax(-1)
        probability = probability * visible.any(1)[:, None, None]
        out = torch.einsum("qhk,khd->qhd", probability, v.repeat_interleave(group, 1))
        x = x + out.flatten(1) @ w["self_attention.linear_proj"].T
        normed = _norm(config, x, w["pre_mlp_layernorm"])
        gate, up = (normed @ w["mlp.linear_fc1"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w["mlp.linear_fc2"].T
    return _norm(config, x, weights["decoder.final_layernorm.weight"])


def _norm(config: DFlashConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight


def _rope(config: DFlashConfig, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + d / 2) as complex numbers."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half).double() / half)
    phase = torch.polar(torch.ones(()).double(), positions.double()[:, None] * frequency)
    turned = torch.complex(x[..., :half], x[..., half:]) * phase[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)
