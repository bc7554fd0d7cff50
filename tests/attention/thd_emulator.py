"""What Transformer Engine's THD attention promises, on the CPU, and not a bit more.

Stands in for `fused_attn_fwd` and `fused_attn_bwd`. It computes sequence by sequence from starts
and lengths, raises where a call leaves the contract, and hands out garbage where the real one does:
statistics outside all ranges are NaN, a range is read in whole tiles whose surplus is multiplied by
0, and gradients come back in the dtype of the inputs. fp32 and fp64, which the real one refuses,
are computed in themselves.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.compat import FusedAttention, bind_fused_attention

TILE = 128
BACKEND = "the backend for any length"
LARGEST_WIDTH = 128


class ContractBreach(AssertionError):
    """A call that the real functions answer with garbage, a crash or an error."""


class ThdEmulator:
    """The two functions in their form since 2.15, and a record of the calls.

    Args:
        reads_behind: multiply the rest of a range's last tile by 0, as some engines do, so that NaN
            there spreads; otherwise those rows are not read.
        ignores_starts: a fault to be found: ranges begin where the lengths before them end.
    """

    def __init__(self, *, reads_behind: bool = True, ignores_starts: bool = False) -> None:
        self.reads_behind = reads_behind
        self.ignores_starts = ignores_starts
        self.calls: list[dict[str, Any]] = []

    def bound(self) -> FusedAttention:
        """The functions as the kernel gets them."""
        functions = SimpleNamespace(
            fused_attn_fwd=self.fused_attn_fwd,
            fused_attn_bwd=self.fused_attn_bwd,
            FusedAttnBackend={"F16_arbitrary_seqlen": BACKEND},
        )
        return bind_fused_attention(functions, {})

    def fused_attn_fwd(
        self,
        is_training: bool,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fake_dtype: torch.dtype,
        fused_attention_backend: object,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        attn_scale: float | None = None,
        dropout: float = 0.0,
        qkv_layout: str = "sbh3d",
        o_format: str = "sbhd",
        attn_mask_type: str = "padding",
        rng_gen: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        call = {k: v for k, v in locals().items() if k != "self"}
        self._check(call)
        _demand(is_training is True, "statistics come from training calls alone")
        statistics = q.new_full((*q.shape[:2], 1), torch.nan, dtype=accumulator_dtype(q.dtype))
        out = torch.zeros_like(q)
        for rows, keys, tile_rows, tile_keys in self._sequences(call):
            scores = _scores(call, tile_rows, tile_keys)
            scores[..., keys.stop - keys.start :] = -torch.inf
            lse = scores.logsumexp(-1, keepdim=True)
            weights = (scores - lse).exp().to(q.dtype).to(scores.dtype)
            tile_out = torch.einsum("gkqs,skd->qkgd", weights, v[tile_keys].to(scores.dtype))
            length = rows.stop - rows.start
            out[rows] = tile_out.flatten(1, 2)[:length].to(q.dtype)
            statistics[rows] = lse.permute(2, 1, 0, 3).flatten(1, 2)[:length]
        return out, [statistics, torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(
        self,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        d_o: torch.Tensor,
        fake_dtype: torch.dtype,
        aux_ctx_tensors: list[torch.Tensor],
        fused_attention_backend: object,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        attn_scale: float | None = None,
        dropout: float = 0.0,
        qkv_layout: str = "sbh3d",
        o_format: str = "sbhd",
        do_format: str = "sbhd",
        dqkv_layout: str = "sbh3d",
        attn_mask_type: str = "padding",
        deterministic: bool = False,
    ) -> list[torch.Tensor]:
        call = {k: v for k, v in locals().items() if k != "self"}
        self._check(call)
        _demand(do_format == "thd" and dqkv_layout == "thd_thd_thd", "layouts of gradients")
        for x in (o, d_o):
            _demand(x.shape == q.shape and x.dtype == q.dtype and x.is_contiguous(), "o and d_o")
        statistics, rng_state = aux_ctx_tensors
        _demand(
            statistics.shape == (*q.shape[:2], 1)
            and statistics.dtype == accumulator_dtype(q.dtype)
            and statistics.is_contiguous(),
            f"statistics {tuple(statistics.shape)} {statistics.dtype}",
        )
        _demand(rng_state.shape == (2,) and rng_state.dtype == torch.int64, "rng_state")
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        for rows, keys, tile_rows, tile_keys in self._sequences(call):
            scores = _scores(call, tile_rows, tile_keys)
            dtype = scores.dtype

            def by_key_head(x: torch.Tensor, rows: slice = tile_rows) -> torch.Tensor:
                return x[rows].to(dtype).unflatten(1, (-1, group))  # noqa: B023

            stats = by_key_head(statistics).permute(2, 1, 0, 3)
            length, num_keys = rows.stop - rows.start, keys.stop - keys.start
            weights = (scores - stats).exp()
            weights[..., num_keys:] = 0.0
            weights[:, :, length:] = 0.0
            grad_out, out, tile_q = by_key_head(d_o), by_key_head(o), by_key_head(q)
            tile_k, tile_v = k[tile_keys].to(dtype), v[tile_keys].to(dtype)
            delta = (grad_out * out).sum(-1).permute(2, 1, 0).unsqueeze(-1)
            grad_weights = torch.einsum("qkgd,skd->gkqs", grad_out, tile_v)
            grad_scores = weights * (grad_weights - delta) * attn_scale
            # Masked by selection, like the weights: only products with them can spread NaN.
            grad_scores[..., num_keys:] = 0.0
            grad_scores[:, :, length:] = 0.0
            rounded, weights = (x.to(q.dtype).to(dtype) for x in (grad_scores, weights))
            grad_q = torch.einsum("gkqs,skd->qkgd", rounded, tile_k).flatten(1, 2)
            grads[0][rows] = grad_q[:length].to(q.dtype)
            grad_k = torch.einsum("gkqs,qkgd->skd", rounded, tile_q)
            grad_v = torch.einsum("gkqs,qkgd->skd", weights, grad_out)
            for grad, x in ((grads[1], grad_k), (grads[2], grad_v)):
                grad[keys] = x[:num_keys].to(k.dtype)
        return [*grads, None, None]

    def _check(self, call: dict[str, Any]) -> None:
        """Raise unless the call is one that the real functions compute."""
        self.calls.append(call)
        q, k, v = call["q"], call["k"], call["v"]
        _demand(call["fused_attention_backend"] == BACKEND, "backend")
        _demand(call["qkv_layout"] == "thd_thd_thd" and call["o_format"] == "thd", "layouts")
        _demand(call["attn_mask_type"] == "padding" and call["dropout"] == 0.0, "mask")
        _demand(isinstance(call["attn_scale"], float), "scale")
        for x in (q, k, v):
            _demand(x.ndim == 3 and x.is_contiguous() and x.shape[0] > 0, f"rows {x.shape}")
            _demand(x.dtype == call["fake_dtype"], f"dtype {x.dtype}")
            width = x.shape[2]
            _demand(width % 8 == 0 and width <= LARGEST_WIDTH, f"head width {width}")
        _demand(k.shape == v.shape and q.shape[2] == k.shape[2], "shapes")
        _demand(q.shape[1] % k.shape[1] == 0, "heads")
        sides = (("q", q.shape[0]), ("kv", k.shape[0]))
        lengths = [self._check_side(call, side, num_rows) for side, num_rows in sides]
        _demand(lengths[0].shape == lengths[1].shape, "as many query as key ranges")
        one_sided = (lengths[0] > 0) != (lengths[1] > 0)
        _demand(not one_sided.any(), "queries without keys, or keys without queries")

    def _check_side(self, call: dict[str, Any], side: str, num_rows: int) -> torch.Tensor:
        cumulative, starts = call[f"cu_seqlens_{side}"], call[f"cu_seqlens_{side}_padded"]
        for x in (cumulative, starts):
            _demand(x is not None and x.dtype == torch.int32, f"{side}: int32")
            _demand(x.ndim == 1 and x.is_contiguous() and x.numel() >= 2, f"{side}: one dimension")
        _demand(cumulative.shape == starts.shape, f"{side}: one shape")
        lengths = cumulative.diff()
        _demand(cumulative[0] == 0 and bool((lengths >= 0).all()), f"{side}: cumulative lengths")
        _demand(bool((lengths <= call[f"max_seqlen_{side}"]).all()), f"{side}: longer than max")
        _demand(bool((starts >= 0).all() and (starts.diff() >= 0).all()), f"{side}: not monotone")
        ends = starts[:-1] + lengths
        _demand(bool((ends <= starts[1:]).all()), f"{side}: ranges overlap")
        _demand(bool((starts <= num_rows).all()), f"{side}: beyond the rows")
        return lengths

    def _sequences(self, call: dict[str, Any]) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Rows and keys of every range that is not empty, exact and as far as tiles reach."""
        sides = []
        for side, x in (("q", call["q"]), ("kv", call["k"])):
            cumulative = call[f"cu_seqlens_{side}"]
            starts = cumulative if self.ignores_starts else call[f"cu_seqlens_{side}_padded"]
            sides.append((starts.tolist(), cumulative.diff().tolist(), x.shape[0]))
        for i in range(len(sides[0][1])):
            if sides[0][1][i] == 0:
                continue
            exact = [slice(starts[i], starts[i] + lengths[i]) for starts, lengths, _ in sides]
            tiles = exact
            if self.reads_behind:
                tiles = [
                    slice(x.start, min(rows, x.start - (x.start - x.stop) // TILE * TILE))
                    for x, (_, _, rows) in zip(exact, sides, strict=True)
                ]
            yield exact[0], exact[1], tiles[0], tiles[1]


def _scores(call: dict[str, Any], rows: slice, keys: slice) -> torch.Tensor:
    """``[g, n_kv, rows, keys]``, scaled, nothing masked."""
    q, k = call["q"], call["k"]
    dtype = accumulator_dtype(q.dtype)
    grouped = q[rows].to(dtype).unflatten(1, (k.shape[1], -1))
    return torch.einsum("qkgd,skd->gkqs", grouped, k[keys].to(dtype)) * call["attn_scale"]


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ContractBreach(what)
