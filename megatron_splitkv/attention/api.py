"""The one function of context-parallel attention: strategies and kernels by name."""

import torch
import torch.distributed as dist

from megatron_splitkv.attention.choice import strategy_of_call
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.strategies import peer_attention, splitkv_attention
from megatron_splitkv.comm import group_rank, group_size, ranks_on_node
from megatron_splitkv.config import CP_COMM_TYPES, KERNELS, ConfigError, require_choice
from megatron_splitkv.plan import ContextPlan, check_window


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    cp_group: dist.ProcessGroup | None,
    *,
    strategy: str = "splitkv",
    kernel: str = "auto",
    softmax_scale: float | None = None,
    window: int | None = None,
    options: SplitKVOptions = SplitKVOptions(),
) -> torch.Tensor:
    """Attention of draft blocks to their context and to themselves, over a context-parallel group.

    Block i sees the context of its document strictly before its anchor, wherever the plan has put
    it, and all rows of its own block. Differentiable in q, k and v. Grouped and single key heads
    are read as they are, never repeated.

    Args:
        q: query rows of this rank's own blocks, `plan.blocks(rank)`, ascending.
        k: keys of this rank's context rows, `plan.rows(rank)`, then those of its own blocks' rows.
        v: values in the order of `k`.
        plan: the plan of the micro-batch, equal on all ranks.
        cp_group: the context-parallel group; None for one process.
        strategy: what travels between ranks, one of `config.CP_COMM_TYPES`, or ``auto``: the
            quickest by `choice.estimate_layer_seconds`, the same on all ranks.
        kernel: the local attention kernel, one of `config.KERNELS`.
        softmax_scale: factor on the scores; ``1 / sqrt(d)`` if None.
        window: of a sliding-window layer: slot j of a block with anchor a sees only positions
            after a + j - window, and of its own block only slots up to j. None: full attention.
        options: of `splitkv`, how queries travel and what is kept for backward; of these `save`
            means keys and values for `all_gather`.

    Returns:
        Output for this rank's query rows, like `q`; 0, with gradient 0, for padding blocks.

    Shape:
        q ``[len(plan.blocks(rank)) * B, n_q, d]``,
        k and v ``[len(plan.rows(rank)) + len(plan.blocks(rank)) * B, n_kv, d]`` -> like q.

    Raises:
        ConfigError: an unknown name, options of another strategy, or tensors that do not fit the
            plan or the strategy.
    """
    num_context_rows = k.shape[0] - q.shape[0]
    if num_context_rows < 0:
        raise ConfigError(
            f"k has {k.shape[0]} rows, fewer than the {q.shape[0]} query rows; "
            "it holds the context rows, then one row per query row"
        )
    if k.shape != v.shape:
        raise ConfigError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}; they must be alike")
    # One backward node that joins both gradients, where two slices would pad and add them.
    context_k, own_k = k.split([num_context_rows, q.shape[0]])
    context_v, own_v = v.split([num_context_rows, q.shape[0]])
    return split_context_parallel_attention(
        q,
        context_k,
        context_v,
        own_k,
        own_v,
        plan,
        cp_group,
        strategy=strategy,
        kernel=kernel,
        softmax_scale=softmax_scale,
        window=window,
        options=options,
    )


def split_context_parallel_attention(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: ContextPlan,
    cp_group: dist.ProcessGroup | None,
    *,
    strategy: str = "splitkv",
    kernel: str = "auto",
    softmax_scale: float | None = None,
    window: int | None = None,
    options: SplitKVOptions = SplitKVOptions(),
) -> torch.Tensor:
    """`context_parallel_attention` for context and own-block keys in tensors of their own.

    For models that project them apart: joining them would copy the context.

    Args:
        q: query rows of this rank's own blocks.
        context_k: keys of this rank's context rows.
        context_v: their values.
        own_k: keys of this rank's own blocks' rows.
        own_v: their values.
        plan: the plan of the micro-batch, equal on all ranks.
        cp_group: the context-parallel group; None for one process.
        strategy: as there.
        kernel: the local attention kernel, one of `config.KERNELS`.
        softmax_scale: factor on the scores; ``1 / sqrt(d)`` if None.
        window: as there.
        options: as there.

    Shape:
        q ``[Q_p, n_q, d]``, context ``[S_p, n_kv, d]``, own ``[Q_p, n_kv, d]`` -> like q.

    Raises:
        ConfigError: an unknown name, options of another strategy, or tensors that do not fit the
            plan or the strategy.
    """
    require_choice("context-parallel strategy", strategy, (*CP_COMM_TYPES, "auto"))
    require_choice("attention kernel", kernel, KERNELS)
    check_window(window)
    options.check_strategy(strategy)
    options.require_projected()
    if not isinstance(plan, ContextPlan):
        raise ConfigError(f"plan is {type(plan).__name__}; give what build_plan returned")
    plan.check_cp_size(group_size(cp_group))
    _check_shapes(q, context_k, context_v, own_k, own_v, plan, group_rank(cp_group))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if strategy == "auto" and plan.cp_size > 1:
        near = ranks_on_node(cp_group, options.ranks_per_node)
        strategy = strategy_of_call(q, context_k.shape[1], plan, options, near)
    if strategy == "splitkv" or cp_group is None or plan.cp_size == 1:  # alone all are the same
        return splitkv_attention(
            q,
            context_k,
            context_v,
            own_k,
            own_v,
            plan,
            cp_group,
            kernel=kernel,
            softmax_scale=scale,
            window=window,
            options=options,
        )
    return peer_attention(
        strategy,
        q,
        context_k,
        context_v,
        own_k,
        own_v,
        plan,
        cp_group,
        kernel=kernel,
        softmax_scale=scale,
        window=window,
        gather_again=options.save == "own",
    )


def _check_shapes(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: ContextPlan,
    rank: int,
) -> None:
    query_rows = plan.layout.num_blocks // plan.cp_size * plan.layout.block_size
    rows = {
        "q": (q, query_rows),
        "context k": (context_k, plan.num_rows(rank)),
        "context v": (context_v, plan.num_rows(rank)),
        "own-block k": (own_k, query_rows),
        "own-block v": (own_v, query_rows),
    }
    if not q.is_floating_point():
        raise ConfigError(f"q is {q.dtype}; give a floating dtype")
    for name, (tensor, expected) in rows.items():
        if tensor.ndim != 3:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; give [rows, heads, width]")
        if tensor.shape[0] != expected:
            raise ConfigError(
                f"{name} has {tensor.shape[0]} rows, the plan gives rank {rank} {expected}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ConfigError(
                f"{name} is {tensor.dtype} on {tensor.device} and q {q.dtype} on {q.device}; give "
                "one dtype and one device"
            )
    keys = [context_k, context_v, own_k, own_v]
    if any(tensor.shape[1:] != context_k.shape[1:] for tensor in keys):
        raise ConfigError(
            f"keys and values differ in heads or width: {[tuple(t.shape[1:]) for t in keys]}"
        )
    num_heads, num_key_heads = q.shape[1], context_k.shape[1]
    groups = num_heads > 0 and num_key_heads > 0 and num_heads % num_key_heads == 0
    if not groups or q.shape[2] != context_k.shape[2] or q.shape[2] == 0:
        raise ConfigError(
            f"{num_heads} query heads of width {q.shape[2]} do not group over {num_key_heads} key "
            f"heads of width {context_k.shape[2]}; widths must be equal and heads divide"
        )
