"""From a name to a peer of split-KV, as one differentiable function."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_splitkv.attention.kernels import select_kernel
from megatron_splitkv.attention.strategies.all_gather import AllGatherAttention
from megatron_splitkv.attention.strategies.lv_xattn import LVXAttention
from megatron_splitkv.attention.strategies.region import PeerStrategy
from megatron_splitkv.attention.strategies.ring import RingAttention
from megatron_splitkv.attention.strategies.ringx import RingXAttention
from megatron_splitkv.attention.strategies.ulysses import UlyssesAttention, check_heads
from megatron_splitkv.comm import group_size
from megatron_splitkv.plan import ContextPlan

_PLAIN: dict[str, type[PeerStrategy]] = {
    "p2p": RingAttention,
    "ringx": RingXAttention,
    "lv_xattn": LVXAttention,
}
# Tensors that they move once a layer, as the meter names them.
PEER_LABELS = frozenset(
    {"q", "k", "v", "kv", "out", "lse", "lse_max", "numerator", "denominator"}
    | {"grad_out", "grad_q", "grad_k", "grad_v", "grad_kv"}
)


def peer_attention(
    strategy: str,
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: ContextPlan,
    cp_group: dist.ProcessGroup,
    *,
    kernel: str = "auto",
    softmax_scale: float,
    window: int | None = None,
    gather_again: bool = False,
) -> torch.Tensor:
    """Attention of this rank's query rows to all ranks' keys, by another strategy than split-KV.

    Args:
        strategy: one of `config.CP_COMM_TYPES` but ``splitkv``.
        q: this rank's query rows.
        context_k: keys of this rank's context rows.
        context_v: their values.
        own_k: keys of this rank's own blocks' rows.
        own_v: their values.
        plan: the plan of the micro-batch.
        cp_group: two ranks or more.
        kernel: name of the local attention kernel.
        softmax_scale: factor on the scores.
        window: of a sliding-window layer; None for full attention.
        gather_again: of `all_gather`: backward gathers keys and values again instead of keeping
            those of all ranks.

    Returns:
        The whole attention output of this rank's rows; 0, with gradient 0, for padding blocks.

    Shape:
        q ``[Q_p, n_q, d]``, context ``[S_p, n_kv, d]``, own ``[Q_p, n_kv, d]`` -> like q.

    Raises:
        ConfigError: heads that `a2a` cannot deal out to the ranks.
    """
    heads, key_heads = q.shape[1], context_k.shape[1]
    if strategy == "a2a":
        size = group_size(cp_group)
        check_heads(heads, key_heads, size)
        heads, key_heads = heads // size, max(1, key_heads // size)
    # The kernel sees as many heads as a rank attends.
    chosen = select_kernel(kernel, q.new_empty((0, heads, q.shape[2])), key_heads)
    shared: dict[str, Any] = {"kernel": chosen, "softmax_scale": softmax_scale, "window": window}
    attention: PeerStrategy
    if strategy == "a2a":
        attention = UlyssesAttention(
            plan, cp_group, num_heads=q.shape[1], num_key_heads=context_k.shape[1], **shared
        )
    elif strategy == "all_gather":
        attention = AllGatherAttention(plan, cp_group, gather_again=gather_again, **shared)
    else:
        attention = _PLAIN[strategy](plan, cp_group, **shared)
    return attention(q, context_k, context_v, own_k, own_v)
