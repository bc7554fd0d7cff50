"""Ordinary attention over a plan of rows, between Megatron's tensors and the plan's order."""

import warnings
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.strategies import splitkv_attention
from megatron_splitkv.comm import group_rank, group_size
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import RowPlan


def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: RowPlan,
    cp_group: dist.ProcessGroup | None,
    *,
    kernel: str = "auto",
    softmax_scale: float | None = None,
    window: int | None = None,
    options: SplitKVOptions = SplitKVOptions(),
) -> torch.Tensor:
    """Attention of this rank's query rows to the keys of all ranks that they see.

    What is copied besides what travels: nothing for one sample whose rows lie as the plan wants
    them, as every order of Megatron's does; one transposition of q, k, v and the output for b > 1
    samples, which become documents of one packed sequence; one permutation of each where
    `plan.query_order` or `plan.key_order` names one.

    Args:
        query: this rank's query rows.
        key: this rank's keys.
        value: their values.
        plan: equal on all ranks.
        cp_group: the context-parallel group; None for one process.
        kernel: the local attention kernel, one of `config.KERNELS`.
        softmax_scale: factor on the scores; ``1 / sqrt(hn)`` if None.
        window: a row sees that many keys at most, its own included; None: no limit.
        options: how queries travel.

    Returns:
        Output of this rank's query rows; 0, with gradient 0, where a row sees nothing.

    Shape:
        query ``[sq, b, np, hn]``, key and value ``[sk, b, ng, hn]`` -> ``[sq, b, np * hn]``;
        packed ``[t, np, hn]``, ``[tk, ng, hn]`` -> ``[t, np * hn]``.

    Raises:
        ConfigError: tensors or a window that do not fit the plan.
    """
    rank = group_rank(cp_group)
    q, k, v = (_as_rows(x) for x in (query, key, value))
    _check(q, k, v, plan, cp_group)
    plan.check_window(window)
    options.require_projected()
    _warn_of_many_queries(plan)
    query_order, back, key_order = _orders(plan, rank, q.device)
    if query_order is not None:
        q = q.index_select(0, query_order)
    if key_order is not None:
        k, v = k.index_select(0, key_order), v.index_select(0, key_order)
    out = splitkv_attention(
        q,
        k,
        v,
        None,
        None,
        plan,
        cp_group,
        kernel=kernel,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        window=window,
        options=options,
    )
    if back is not None:
        out = out.index_select(0, back)
    out = out.flatten(1)  # [rows, np * hn]
    if query.ndim == 3:
        return out
    return out.unflatten(0, (query.shape[1], query.shape[0])).transpose(0, 1).contiguous()


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[s, b, h, d]`` -> ``[b * s, h, d]``, a view for b = 1; packed rows as they are."""
    return x if x.ndim == 3 else x.transpose(0, 1).flatten(0, 1)


Order = torch.Tensor | None

# For each plan, what this process needs of it on a device.
_ORDERS: WeakKeyDictionary[RowPlan, dict[tuple[int, torch.device], tuple[Order, Order, Order]]] = (
    WeakKeyDictionary()
)


def _orders(plan: RowPlan, rank: int, device: torch.device) -> tuple[Order, Order, Order]:
    """The order of the rank's query rows, the way back, and the order of its keys."""
    kept = _ORDERS.setdefault(plan, {})
    if (rank, device) not in kept:
        queries, keys = (
            None if order is None else torch.from_numpy(order).to(device)
            for order in (plan.query_order(rank), plan.key_order(rank))
        )
        kept[rank, device] = (queries, None if queries is None else torch.argsort(queries), keys)
    return kept[rank, device]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: RowPlan,
    cp_group: dist.ProcessGroup | None,
) -> None:
    plan.check_cp_size(group_size(cp_group))
    rank = group_rank(cp_group)
    for name, x, rows in (
        ("query", q, plan.blocks_per_rank),
        ("key", k, plan.num_rows(rank)),
        ("value", v, plan.num_rows(rank)),
    ):
        if x.ndim != 3:
            raise ConfigError(
                f"{name} has {x.ndim - 1} dimensions after its rows; give heads, width"
            )
        if x.shape[0] != rows:
            raise ConfigError(
                f"{name} has {x.shape[0]} rows (all samples together), the plan gives rank {rank} "
                f"{rows}"
            )
        if x.dtype != q.dtype:
            raise ConfigError(f"{name} is {x.dtype} and query {q.dtype}; give one dtype")
    heads, key_heads = q.shape[1], k.shape[1]
    if k.shape != v.shape or q.shape[2] != k.shape[2] or not key_heads or heads % key_heads:
        raise ConfigError(
            f"{heads} query heads of width {q.shape[2]}, {key_heads} key heads of width "
            f"{k.shape[2]} and {v.shape[1]} value heads of width {v.shape[2]} do not fit: widths "
            "must be equal, and query heads a multiple of as many key and value heads"
        )


_warned: set[str] = set()


def _warn_of_many_queries(plan: RowPlan) -> None:
    """Say once where split-KV is the wrong choice: it moves queries, and here they are many."""
    if _warned or plan.cp_size == 1 or 2 * plan.num_blocks <= plan.num_keys or dist.get_rank() > 0:
        return
    _warned.add("many queries")
    warnings.warn(
        "splitkv moves queries and their outputs, never keys, and pays where queries are few: "
        f"{plan.num_blocks} query rows attend {plan.num_keys} keys here; results are exact, but "
        "another --cp-comm-type would move less",
        stacklevel=2,
    )
