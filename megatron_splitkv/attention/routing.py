"""From a plan to the routes of its query rows: once for all layers of a micro-batch."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.comm import Routes, RowExchange, group_rank, ranks_on_node
from megatron_splitkv.plan import AttentionPlan

_EXCHANGES: WeakKeyDictionary[AttentionPlan, dict[Any, RowExchange]] = WeakKeyDictionary()


def row_exchange(
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    device: torch.device,
    cast: str,
    window: int | None,
    ranks_per_node: int | None = None,
) -> RowExchange:
    """The exchange of the plan's query rows over the group.

    Args:
        plan: whose queries.
        group: the ranks of the plan.
        device: of the tensors that will travel.
        cast: ``all`` or ``group``.
        window: of the layer; with it fewer ranks hold keys that a block sees.
        ranks_per_node: see `comm.ranks_on_node`; of a cast ``all``, whose returns take two levels.
    """
    kept = _EXCHANGES.setdefault(plan, {})
    key = (group, device, cast, ranks_per_node, window if cast == "group" else None)
    if key not in kept:
        kept[key] = _build(plan, group, device, cast, window, ranks_per_node)
    return kept[key]


def _build(
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    device: torch.device,
    cast: str,
    window: int | None,
    ranks_per_node: int | None,
) -> RowExchange:
    size = plan.block_size
    own_rows = plan.blocks_per_rank * size
    blocks = plan.query_cast(group_rank(group), cast, window)
    if blocks.everything:
        return RowExchange(group, own_rows, node_ranks=ranks_on_node(group, ranks_per_node))

    def rows(of_blocks: Iterable[NDArray[np.int64]]) -> torch.Tensor:
        first = np.concatenate([*of_blocks]) * size
        return torch.from_numpy((first[:, None] + np.arange(size)).ravel()).to(device)

    return RowExchange(
        group,
        own_rows,
        Routes(
            sent_index=rows(blocks.sent),
            sent_rows=[b.size * size for b in blocks.sent],
            received_rows=[int(n) * size for n in blocks.received],
            attended_index=rows([blocks.blocks]),
        ),
    )
