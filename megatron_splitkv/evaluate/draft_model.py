"""A DFlash drafter in plain torch, for one text at a time: what a serving engine does, small.

The context rows that all layers attend to are the same tapped target features, normed once and
updated by no layer. So each row's keys and values are computed when the row arrives, in every
layer at once, and never again; a draft step then only runs its block.

Shape legend: B draft rows, R new context rows, C tapped layers, d hidden size, n_q query and n_kv
key/value heads, hd head width.
"""

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.rope import apply_rotary, rotary_cos_sin

_INITIAL_STD = 0.02


class ContextCache:
    """Keys and values of the context rows of one text, a slot a position.

    Slots from `length` on are free: a draft step writes its block's keys and values there, reads
    all of them as one view, and leaves them to be overwritten.

    Args:
        config: the drafter.
        max_length: positions of the text, prompt included.
        like: gives dtype and device.
    """

    def __init__(self, config: DFlashConfig, max_length: int, like: torch.Tensor) -> None:
        shape = (config.num_layers, config.num_key_value_heads, max_length, config.head_dim)
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.length = 0

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows ``[rows, n_kv, hd]`` of one layer at the positions from `start` on."""
        positions = slice(start, start + key.shape[0])
        self.keys[layer, :, positions] = key.transpose(0, 1)
        self.values[layer, :, positions] = value.transpose(0, 1)


class DraftModel(nn.Module):
    """The drafter; parameters carry the names of the public checkpoint.

    Args:
        config: the drafter.
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
            tensors: by their public names, all of one dtype; see `export.read_drafter`.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(dict(tensors), strict=True, assign=True)
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
        """Return an empty cache for a text of at most `max_length` tokens."""
        return ContextCache(self.config, max_length, self.fc.weight)

    def extend_context(self, features: torch.Tensor, cache: ContextCache) -> None:
        """Append context rows: project them and keep each layer's keys and values.

        Args:
            features: outputs of the tapped target layers at the positions from
                ``cache.length`` on.
            cache: of this text.

        Shape:
            ``features [R, C * d]``.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotary = self._rotary(cache.length, features.shape[0])
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            key, value = layer.self_attn.key_value(context, rotary)
            cache.write(i, cache.length, key, value)
        cache.length += features.shape[0]

    def draft(self, block: torch.Tensor, cache: ContextCache) -> torch.Tensor:
        """Run one block behind the context; the cache's length stays as it is.

        Args:
            block: target embeddings of the anchor's token and of the mask tokens.
            cache: holds the context rows of all positions before the anchor.

        Returns:
            Final hidden states, ready for the target's head.

        Shape:
            ``block`` and result ``[B, d]``.
        """
        hidden = block.to(self.fc.weight.dtype)
        rotary = self._rotary(cache.length, block.shape[0])
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, cache, i)
        return self.norm(hidden)

    def _rotary(self, start: int, rows: int) -> torch.Tensor:
        positions = torch.arange(start, start + rows, device=self.fc.weight.device)
        return rotary_cos_sin(positions, self.config.head_dim, self.config.rope_theta)


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.mlp = _SwiGLU(d, config.ffn_hidden_size)

    def forward(
        self, hidden: torch.Tensor, rotary: torch.Tensor, cache: ContextCache, layer: int
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, cache, layer)
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
        self, rows: torch.Tensor, rotary: torch.Tensor, cache: ContextCache, layer: int
    ) -> torch.Tensor:
        query = _rotate(self.q_norm(self._heads(self.q_proj(rows))), rotary)
        cache.write(layer, cache.length, *self.key_value(rows, rotary))
        visible = slice(0, cache.length + rows.shape[0])
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            cache.keys[layer, :, visible][None],
            cache.values[layer, :, visible][None],
            enable_gqa=True,
        )
        return self.o_proj(out[0].transpose(0, 1).flatten(1))

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
