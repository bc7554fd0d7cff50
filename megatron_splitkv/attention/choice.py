"""Strategy `auto`: the strategy of the least estimated time for a layer on a machine.

An estimate is what the slowest rank spends on attention and on communication that nothing hides,
forward and backward. What all strategies have in common (projections of own rows, feed-forward) is
left out, and so are memory and how well a kernel fills a processor.

- Split-KV: `placement.place_seconds`. Its gather hides behind the projection of keys and values.
- Loops over ranks (`p2p`, `lv_xattn`, `ringx`): shards travel while the ones before are attended;
  the last transfer and agreements between a turn's steps hide behind nothing. Hops between
  neighbours cost more than their link and the kernel say: as much as was published.
- `a2a` and `all_gather` wait for everything that travels.

Volumes are those of `strategies.volumes`, times those of `comm.links`, work that of the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch

from megatron_splitkv.attention.layer_shape import LayerShape, Load
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.placement import Places, choose_places, place_seconds
from megatron_splitkv.attention.strategies import check_heads
from megatron_splitkv.attention.strategies.volumes import Traffic, volume
from megatron_splitkv.attention.transfers import links_with_nodes, move_seconds
from megatron_splitkv.comm.links import Links
from megatron_splitkv.config import BLOCK_ORDERS, CP_COMM_TYPES, ConfigError, require_choice
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.plan.cost import PlanCost

_BACKWARD = 2.5  # five products of a pair where forward has two
_LOOPS = ("p2p", "lv_xattn", "ringx")
_HOPS = ("p2p", "lv_xattn")
# What hops cost beyond their link: pairs cut into a call a hop take longer, and each byte is waited
# for, copied and added up. Fitted to published times at P = 8 (`scale.FITTED`, held equal by a
# test); without it a ring whose transfers all hide would seem as quick as no ring.
HOP_SLOWDOWN, HOP_BYTE_SECONDS = 1.194, 1.988e-11
_NEVER_HIDDEN = ("lse_max",)  # the next step of its turn needs it


PlanWay = tuple[str, str]
"""How a plan is made: how context rows are assigned, and the order of draft blocks."""


def block_order_of(strategies: Iterable[str]) -> str:
    """How a launch deals out draft blocks: one plan serves all its layers.

    Where queries stay with their owners for a while (`all_gather`, `p2p`) or come to keys one owner
    after the other (`ringx`, `lv_xattn`), ranks wait for the owner of the latest anchors: mirrored.
    `a2a` splits heads and does not care. Split-KV sends queries of all owners at once, and those of
    a document should be few ranks' for its group-cast: contiguous, as soon as one layer has it.

    Args:
        strategies: of the layers, `config.CP_COMM_TYPES`.
    """
    caring = set(strategies) - {"a2a"}
    return "mirrored" if caring and "splitkv" not in caring else "contiguous"


@dataclass(frozen=True)
class Choice:
    """What `auto` came to.

    Args:
        strategy: one of `config.CP_COMM_TYPES`.
        plan_strategy: how context rows are assigned.
        block_order: how draft blocks are.
        places: of split-KV; what is said about it also where another strategy was chosen.
        seconds: estimates of a layer, by strategy, under its best plan.
        excluded: why a strategy cannot run here, by strategy.
        reason: one line.
    """

    strategy: str
    plan_strategy: str
    block_order: str
    places: Places
    seconds: Mapping[str, float]
    excluded: Mapping[str, str]
    reason: str


@lru_cache(maxsize=4096)
def estimate_layer_seconds(
    strategy: str, shape: LayerShape, links: Links, options: SplitKVOptions = SplitKVOptions()
) -> float:
    """Seconds of one layer's attention and of its communication that nothing hides.

    Args:
        strategy: one of `config.CP_COMM_TYPES`.
        shape: of the layer, with the load of its plan.
        links: the machine.
        options: what the user fixed.

    Raises:
        ConfigError: unknown strategy, or one that cannot run with these heads.
    """
    require_choice("context-parallel strategy", strategy, CP_COMM_TYPES)
    links = links_with_nodes(links, shape.node_ranks)
    ranks, work = shape.cp_size, shape.loaded.pairs
    if strategy == "a2a":
        check_heads(shape.heads, shape.kv_heads, ranks)
    forward, backward, heads, calls = {
        "splitkv": (work.key_owners, work.key_owners, shape.heads, 1),
        "a2a": (work.total, work.total, shape.heads / ranks, 2 * ranks),
        "all_gather": (work.query_owners, work.query_owners, shape.heads, ranks),
        "p2p": (work.hops, work.hops, shape.heads, ranks),
        "lv_xattn": (work.hops, work.hops, shape.heads, ranks),
        "ringx": (work.query_turns, work.key_turns, shape.heads, ranks),
    }[strategy]
    per_pair = 4 * heads * shape.head_width / links.attention_flops
    per_pair *= HOP_SLOWDOWN if strategy in _HOPS and ranks > 1 else 1.0
    compute = [
        per_pair * forward + calls * links.call_latency,
        per_pair * _BACKWARD * backward + calls * links.call_latency,
    ]
    if ranks == 1:
        return sum(compute)
    if strategy == "splitkv":
        places = choose_places(options, shape, links)
        seconds = place_seconds(options, shape, links)
        return sum(compute) + seconds[places.gather] + seconds[places.scatter]
    moved = volume(strategy, shape.traffic("q", "heads"))
    directions = [
        seconds + _exposed_seconds(traffic, links, ranks, seconds if strategy in _LOOPS else 0.0)
        for traffic, seconds in zip((moved.forward, moved.backward), compute, strict=True)
    ]
    gathered_again = strategy == "all_gather" and options.save == "own"
    return sum(directions) + gathered_again * _exposed_seconds(moved.forward, links, ranks, 0.0)


def _exposed_seconds(traffic: Traffic, links: Links, ranks: int, compute: float) -> float:
    """Transfers of one direction that outlast the computation of a loop's other steps."""
    hidden = exposed = 0.0
    for move in traffic.moves:
        seconds = move_seconds(move, links, ranks, hop_byte_seconds=HOP_BYTE_SECONDS)
        behind = 0 if move.label in _NEVER_HIDDEN else min(move.calls, ranks - 1) / move.calls
        hidden += seconds * behind
        exposed += seconds * (1 - behind)
    return exposed + max(0.0, hidden - compute * (ranks - 1) / ranks)


@lru_cache(maxsize=256)
def choose_strategy(
    shape: LayerShape, links: Links, options: SplitKVOptions = SplitKVOptions()
) -> Choice:
    """The quickest strategy for one micro-batch under its plan, whatever that is.

    Args:
        shape: of the layer, with the load of its plan.
        links: the machine.
        options: what the user fixed.
    """
    packs = {("balanced", order): (shape,) for order in BLOCK_ORDERS}
    return choose_for_packs(packs, links, options)


_LOADS: WeakKeyDictionary[ContextPlan, dict[tuple[str, int, int], Load]] = WeakKeyDictionary()


def strategy_of_call(
    q: torch.Tensor, num_key_heads: int, plan: ContextPlan, options: SplitKVOptions, node_ranks: int
) -> str:
    """The strategy for one call of attention with projected tensors.

    Args:
        q: this rank's queries ``[rows, n_q, d]``; only their heads, width, dtype and device count.
        num_key_heads: n_kv.
        plan: of the micro-batch; its load is counted once.
        options: of the call.
        node_ranks: of the group, see `comm.ranks_on_node`.
    """
    links = links_with_nodes(options.links_on(q.device.type), node_ranks)
    kept = _LOADS.setdefault(plan, {})
    key = (options.query_cast, links.ranks_per_node, node_ranks)
    if key not in kept:
        kept[key] = Load.of_plan(plan, *key)
    shape = LayerShape(
        query_rows=plan.num_blocks * plan.block_size,
        context_rows=plan.context_length,
        cp_size=plan.cp_size,
        heads=q.shape[1],
        kv_heads=num_key_heads,
        head_width=q.shape[2],
        hidden_size=0,
        itemsize=q.element_size(),
        load=kept[key],
        node_ranks=node_ranks,
    )
    return choose_strategy(shape, links, options).strategy


def choose_for_packs(
    packs: Mapping[PlanWay, Sequence[LayerShape]],
    links: Links,
    options: SplitKVOptions = SplitKVOptions(),
    beside: Sequence[str] = (),
) -> Choice:
    """The quickest strategy and plan strategy for several micro-batches together.

    Pure: every rank comes to the same choice. The first of equals wins.

    Args:
        packs: by how the plan is made, the layer with the load of each of the same micro-batches.
            Each strategy is estimated under the plans with its order of blocks, `block_order_of`.
        links: the machine.
        options: what the user fixed.
        beside: strategies of other layers, which share the plan.
    """
    seconds: dict[str, float] = {}
    plans: dict[str, PlanWay] = {}
    excluded: dict[str, str] = {}
    for strategy in CP_COMM_TYPES:
        try:
            by_plan = {
                plan: sum(
                    estimate_layer_seconds(strategy, shape, links, options) for shape in given
                )
                / len(given)
                for plan, given in packs.items()
                if plan[1] == block_order_of((strategy, *beside))
            }
        except ConfigError as error:
            excluded[strategy] = str(error)
            continue
        plans[strategy] = min(by_plan, key=lambda plan: by_plan[plan])
        seconds[strategy] = by_plan[plans[strategy]]
    order = sorted(seconds, key=lambda strategy: seconds[strategy])
    best = order[0]
    shape = packs[plans["splitkv"]][0]
    places = choose_places(options, shape, links)
    return Choice(
        strategy=best,
        plan_strategy=plans[best][0],
        block_order=plans[best][1],
        places=places,
        seconds=seconds,
        excluded=excluded,
        reason=_reason(order, seconds, excluded, plans[best], places, shape, links),
    )


def _reason(
    order: Sequence[str],
    seconds: Mapping[str, float],
    excluded: Mapping[str, str],
    plan: PlanWay,
    places: Places,
    shape: LayerShape,
    links: Links,
) -> str:
    best = order[0]
    how = f" (gather {places.gather}, scatter {places.scatter})" if best == "splitkv" else ""
    blocks = " and mirrored blocks" if plan[1] == "mirrored" else ""
    others = ", ".join(
        f"{strategy} {seconds[strategy] / seconds[best]:.3g}x" for strategy in order[1:]
    )
    left_out = "".join(f"; without {name}: {why}" for name, why in excluded.items())
    return (
        f"--cp-comm-type auto chose {best}{how} with plan {plan[0]}{blocks}: "
        f"{1e3 * seconds[best]:.3g} ms of "
        f"attention and exposed communication a layer by estimate, for {shape.query_rows} queries "
        f"over {shape.context_rows} rows on {shape.cp_size} ranks over links {links.name}; "
        f"next best: {others}{left_out}"
    )


def links_of_group(links: Links, tensor_parallel_size: int) -> Links:
    """The machine as one of several interleaved context-parallel groups sees it.

    Megatron numbers tensor-parallel ranks first: a node holds fewer ranks of each context-parallel
    group, and the groups share its network cards.

    Args:
        links: the machine.
        tensor_parallel_size: groups side by side.
    """
    groups = tensor_parallel_size
    own_cards = max(1, links.nics_per_node // groups)
    return replace(
        links,
        ranks_per_node=max(1, links.ranks_per_node // groups),
        nics_per_node=own_cards,
        nic_bandwidth=links.node_bandwidth / groups / own_cards,
    )


def plan_cost(shape: LayerShape, links: Links) -> PlanCost:
    """What a choice between plans weighs, on the same machine.

    A row that leaves its rank is priced as one that all ranks exchange: by the slower of the links
    inside a node and, if the group is larger than one, between nodes.

    Args:
        shape: of a layer.
        links: the machine, as the group sees it.
    """
    within = shape.cp_size <= links.ranks_per_node
    speed = links.intra_bandwidth if within else min(links.intra_bandwidth, links.inter_bandwidth)
    return PlanCost.of_layer(
        num_query_heads=shape.heads,
        head_dim=shape.head_width,
        itemsize=shape.itemsize,
        flops=links.attention_flops,
        bytes_per_second=speed,
    )
