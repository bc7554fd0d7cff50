"""A drafter's backbone in plain torch, for a few texts at once: what a serving engine does, small.

The context rows that all layers attend to are the same tapped target features, normed once and
updated by no layer. So each row's keys and values are computed when the row arrives, in every
layer at once, and never again; a draft step then only runs its blocks. Texts have their own
lengths: the new rows of all texts go through the projections one behind the other, without
padding, and the attention of a block masks what its own text does not hold.

Shape legend: n texts, b slots of the longest block, R new context rows of all texts, C tapped
layers, d hidden size, n_q query and n_kv key/value heads, hd head width, S visible cache slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.rope import apply_rotary, rotary_cos_sin
from megatron_splitkv.evaluate.context_cache import ContextCache

_INITIAL_STD = 0.02


class DraftModel(nn.Module):
    """The drafter without embedding and head; parameters carry the public checkpoint's names.

    Args:
        config: the drafter, of any kind.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.fc = nn.Linear(config.feature_width, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(d, config.rms_norm_eps)

    @classmethod
    def from_tensors(cls, config: DFlashConfig, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Build a drafter around the tensors of an exported checkpoint, frozen.

        Args:
            config: the drafter.
            tensors: by their public names, all of one dtype; see `export.read_drafter`. Those of
                the kind's head are left to `heads.proposal_head`.
        """
        with torch.device("meta"):
            model = cls(config)
        own = {name: tensors[name] for name in tensors.keys() - config.head_shapes().keys()}
        model.load_state_dict(own, strict=True, assign=True)
        return model.eval().requires_grad_(False)

    @classmethod
    def untrained(cls, config: DFlashConfig, seed: int) -> Self:
        """Return a drafter with fresh weights, frozen: what training starts from.

        Args:
            config: the drafter.
            seed: of the matrices; norms are one.
        """
        model = cls(config).requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_INITIAL_STD, generator=generator)
        return model.eval()

    def new_cache(self, max_length: int) -> ContextCache:
        """Return an empty cache for one text of at most `max_length` tokens."""
        return ContextCache(self.config, max_length, self.fc.weight)

    def extend_context(
        self, features: torch.Tensor, cache: ContextCache, counts: Sequence[int] | None = None
    ) -> None:
        """Append context rows: project them and keep each layer's keys and values.

        Args:
            features: outputs of the tapped target layers at the positions from each text's length
                on, one text behind the other.
            cache: of these texts.
            counts: new rows of each text; None where there is only one text.

        Shape:
            ``features [R, C * d]``.
        """
        counts = [features.shape[0]] if counts is None else counts
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rows = _Rows.behind(cache, counts, context.device)
        rotary = self._rotary(rows.positions)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            key, value = layer.self_attn.key_value(context, rotary)
            cache.write(i, rows.texts, rows.positions, key, value)
        cache.lengths = [old + new for old, new in zip(cache.lengths, counts, strict=True)]

    def draft(
        self, blocks: torch.Tensor, cache: ContextCache, slots: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run one block of every text behind its context; the cache's lengths stay as they are.

        Args:
            blocks: scaled target embeddings of the anchor's token and of the mask tokens, one text
                behind the other, padded to the longest block.
            cache: holds the context rows of all positions before each anchor.
            slots: of each text's own block; None if no block is padded.

        Returns:
            Final hidden states, ready for the target's head; finite and meaningless in padding.

        Shape:
            ``blocks`` and result ``[n * b, d]``.
        """
        texts = len(cache.lengths)
        b = blocks.shape[0] // texts
        rows = _Rows.behind(cache, [b] * texts, blocks.device)
        masks = {
            window: _mask(self.config, cache.lengths, slots or [b] * texts, b, window, rows)
            for window in set(self.config.windows)
        }
        hidden = blocks.to(self.fc.weight.dtype)
        rotary = self._rotary(rows.positions)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, cache, i, rows, masks[self.config.windows[i]])
        return self.norm(hidden)

    def _rotary(self, positions: torch.Tensor) -> torch.Tensor:
        return rotary_cos_sin(positions, self.config.head_dim, self.config.rope_theta)


@dataclass(frozen=True)
class _Rows:
    """Where rows belong: text and position, int64 ``[rows]`` each."""

    texts: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def behind(cls, cache: ContextCache, counts: Sequence[int], device: torch.device) -> Self:
        """The next `counts` positions of each text of a cache."""
        texts = [text for text, count in enumerate(counts) for _ in range(count)]
        positions = [
            position
            for length, count in zip(cache.lengths, counts, strict=True)
            for position in range(length, length + count)
        ]
        return cls(torch.tensor(texts, device=device), torch.tensor(positions, device=device))


def _mask(
    config: DFlashConfig,
    lengths: Sequence[int],
    slots: Sequence[int],
    b: int,
    window: int | None,
    rows: _Rows,
) -> torch.Tensor | None:
    """What every slot of every block sees of the cache; None if it is everything.

    A slot of a full layer sees its context and all of its block. In a layer with a window it sees
    less than W positions back, and no slot behind itself.

    Shape:
        result bool ``[n, 1, (n_q / n_kv) * b, S]``: the query heads of one key/value head lie one
        behind the other.

    Source: z-lab/dflash, `dflash/model.py`, `_attention_mask` and `Qwen3DFlashAttention`.
    """
    if window is None and len(lengths) == 1:
        return None
    keys = torch.arange(max(lengths) + b, device=rows.positions.device)
    if window is None:
        ends = [length + own for length, own in zip(lengths, slots, strict=True)]
        visible = keys < torch.tensor(ends, device=keys.device)[:, None, None]
        visible = visible.expand(-1, b, -1)
    else:
        behind = rows.positions.view(-1, b, 1) - keys
        visible = (behind >= 0) & (behind < window)
    return visible.repeat(1, config.num_attention_heads // config.num_key_value_heads, 1)[:, None]


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.mlp = _SwiGLU(d, config.ffn_hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        cache: ContextCache,
        layer: int,
        rows: _Rows,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, rotary, cache, layer, rows, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(d, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, d, bias=False)
        self.q_norm = nn.RMSNorm(head, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, config.rms_norm_eps)

    def key_value(
        self, rows: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[rows, n_kv, hd]`` of context rows or of normed draft rows."""
        key = self.k_norm(self._heads(self.k_proj(rows)))
        return _rotate(key, rotary), self._heads(self.v_proj(rows))

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        cache: ContextCache,
        layer: int,
        rows: _Rows,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        query = _rotate(self.q_norm(self._heads(self.q_proj(hidden))), rotary)
        cache.write(layer, rows.texts, rows.positions, *self.key_value(hidden, rotary))
        texts = len(cache.lengths)
        b = hidden.shape[0] // texts
        visible = slice(0, max(cache.lengths) + b)
        key, value = cache.keys[layer, :, :, visible], cache.values[layer, :, :, visible]
        query = query.unflatten(0, (texts, b)).transpose(1, 2)  # [n, n_q, b, hd]
        if mask is None:
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            # Query heads as rows of their key/value head: fused kernels that take a mask know no
            # groups, and would otherwise want every key once per query head.
            grouped = query.reshape(texts, key.shape[1], -1, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
            out = out.reshape(query.shape)
        return self.o_proj(out.transpose(1, 2).reshape(texts * b, -1))

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))


class _SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))


def _rotate(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    return apply_rotary(heads[:, None], rotary)[:, 0]
