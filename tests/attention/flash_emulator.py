"""torch's two varlen flash operations on the CPU: what they promise, and poison where they do not.

Stands in for `flash._flash_forward` and `flash._flash_backward`. Computes in fp32 (fp64 for fp64
inputs, which the real ones refuse) and rounds where they round. A call that they would not survive
or answer with something else than attention raises `ContractError`.
"""

from itertools import pairwise

import torch

LOWEST_PRECISION = (torch.float16, torch.bfloat16)
LARGEST_WIDTH = 256


class ContractError(AssertionError):
    """A call that the operations do not take."""


def require(condition, what):
    if not condition:
        raise ContractError(what)


class FlashEmulator:
    """Both operations; counts their calls and the pairs that they compute.

    Args:
        lse_scale: 1 as it is; log2(e) as kernels have it that compute in base 2.
    """

    def __init__(self, lse_scale=1.0):
        self.lse_scale = lse_scale
        self.forward_calls = 0
        self.backward_calls = 0
        self.pairs = 0
        self.rows_given = []  # data pointers and lengths of every q and k, to tell copies apart

    def install(self, monkeypatch, flash):
        monkeypatch.setattr(flash, "_flash_forward", self.forward)
        monkeypatch.setattr(flash, "_flash_backward", self.backward)
        return self

    def forward(
        self,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale=None,
    ):
        ranges = check_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        require((dropout_p, is_causal, return_debug_mask) == (0.0, False, False), "plain attention")
        grouped = query.shape[1] > key.shape[1]
        require(max_q > 1 or not grouped, "longest query range 1: the statistics change layout")
        self.forward_calls += 1
        self.rows_given += [(x.data_ptr(), x.shape[0]) for x in (query, key)]
        dtype = accumulator(query)
        out = torch.full_like(query, torch.nan)
        lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=dtype)
        for q_rows, k_rows in ranges:
            self.pairs += (q_rows.stop - q_rows.start) * (k_rows.stop - k_rows.start)
            scores = scores_of(query[q_rows], key[k_rows], scale)
            lse[:, q_rows] = scores.logsumexp(-1)
            weights = (scores - lse[:, q_rows, None]).exp().to(value.dtype).to(dtype)
            out[q_rows] = torch.einsum("hqk,khd->qhd", weights, heads_of(value[k_rows], query)).to(
                query.dtype
            )
        empty = torch.empty(0, dtype=torch.uint64)
        return out, lse * self.lse_scale, empty, empty, empty

    def backward(
        self,
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng_state,
        unused,
        *,
        scale=None,
    ):
        ranges = check_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        require((dropout_p, is_causal) == (0.0, False), "plain attention")
        require(rng_state.dtype == unused.dtype == torch.uint64, "random state in uint64")
        dtype = accumulator(query)
        for x in (grad_out, out):
            require(x.shape == query.shape and x.dtype == query.dtype, "out and grad_out like q")
        require(logsumexp.shape == (query.shape[1], query.shape[0]), "statistics [heads, rows]")
        require(logsumexp.dtype == dtype and logsumexp.is_contiguous(), "fp32 rows of statistics")
        require(bool(logsumexp.isfinite().all()), "statistics of a row that sees something")
        self.backward_calls += 1
        grad_q = torch.full_like(query, torch.nan)
        # One gradient of keys and values for every query head, rounded before they are added.
        grad_k = torch.full((key.shape[0], *query.shape[1:]), torch.nan, dtype=key.dtype)
        grad_v = grad_k.clone()
        for q_rows, k_rows in ranges:
            rows, keys = query[q_rows], heads_of(key[k_rows], query)
            values = heads_of(value[k_rows], query)
            grad = grad_out[q_rows].to(dtype)
            weights = scores_of(rows, key[k_rows], scale).sub(logsumexp[:, q_rows, None]).exp()
            delta = (grad * out[q_rows].to(dtype)).sum(-1).T[..., None]
            grad_scores = weights * (torch.einsum("qhd,khd->hqk", grad, values) - delta) * scale
            grad_scores = grad_scores.to(query.dtype).to(dtype)
            weights = weights.to(query.dtype).to(dtype)
            grad_q[q_rows] = torch.einsum("hqk,khd->qhd", grad_scores, keys).to(query.dtype)
            grad_k[k_rows] = torch.einsum("hqk,qhd->khd", grad_scores, rows.to(dtype)).to(key.dtype)
            grad_v[k_rows] = torch.einsum("hqk,qhd->khd", weights, grad).to(key.dtype)
        of_group = [x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_k, grad_v)]
        return grad_q, *of_group


def check_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k):
    """The ranges of a call, as pairs of slices."""
    for x in (query, key, value):
        require(x.ndim == 3 and x.stride(-1) == 1, "rows, heads, adjacent width")
        require(x.dtype == query.dtype, "one dtype")
    require(key.shape == value.shape, "keys like values")
    width = query.shape[2]
    require(key.shape[2] == width and width % 8 == 0 and width <= LARGEST_WIDTH, "head width")
    require(query.shape[1] % key.shape[1] == 0, "grouped heads")
    sides = []
    for lengths, x, longest in ((cum_seq_q, query, max_q), (cum_seq_k, key, max_k)):
        require(lengths.dtype == torch.int32 and lengths.is_contiguous(), "int32 lengths")
        bounds = lengths.tolist()
        require(len(bounds) >= 2 and bounds[0] == 0, "at least one range, from row 0")
        require(bounds[-1] == x.shape[0], "rows in no range: their results are undefined")
        require(all(a < b for a, b in pairwise(bounds)), "no empty range")
        require(type(longest) is int, "the longest range is known on the host")
        require(all(b - a <= longest for a, b in pairwise(bounds)), "longest")
        sides.append([slice(a, b) for a, b in pairwise(bounds)])
    require(len(sides[0]) == len(sides[1]), "as many query ranges as key ranges")
    return list(zip(*sides, strict=True))


def accumulator(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def heads_of(keys, query):
    """`keys` for every query head, in the accumulator dtype."""
    return keys.to(accumulator(query)).repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def scores_of(rows, keys, scale):
    dtype = accumulator(rows)
    return torch.einsum("qhd,khd->hqk", rows.to(dtype), heads_of(keys, rows)) * scale
