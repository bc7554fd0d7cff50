"""What ``--cp-comm-type auto`` would choose for a point of `bench step`, and what that costs.

The estimate sees what the bench runs: its own heads and the machine whose links it injects, slowed
down as the bench slows it, and this core's own time for a call of its kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.attention.choice import Choice, PlanWay, block_order_of, choose_for_packs
from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.bench.step_shape import Method, StepShape
from megatron_splitkv.bench.step_time import Injection
from megatron_splitkv.comm.links import Links, default_links
from megatron_splitkv.comm.topology import split_by_node
from megatron_splitkv.config import BLOCK_ORDERS

_PLAN = "balanced"


@dataclass(frozen=True)
class AutoChoice:
    """The choice, as one of the methods that were measured.

    Args:
        method: what is run for it.
        choice: with the estimates.
    """

    method: Method
    choice: Choice


def choose_auto(
    shape: StepShape, cp_size: int, injection: Injection | None, methods: Sequence[Method]
) -> AutoChoice:
    """Choose as a launch does that knows this micro-batch; queries go to all ranks.

    Args:
        shape: the layer and its micro-batch.
        cp_size: P.
        injection: the machine; None for the one that it runs on, by the device's preset.
        methods: those that are run.
    """
    links = default_links("cuda") if injection is None else standing_links(injection)
    dflash = shape.dflash
    layer = LayerShape(
        query_rows=0,
        context_rows=0,
        cp_size=cp_size,
        heads=dflash.num_attention_heads,
        kv_heads=dflash.num_key_value_heads,
        head_width=dflash.head_dim,
        hidden_size=dflash.hidden_size,
        itemsize=2 if shape.dtype == "bfloat16" else 4,
        node_ranks=split_by_node(range(cp_size), shape.ranks_per_node),
    )
    packs: dict[PlanWay, Sequence[LayerShape]] = {}
    for order in BLOCK_ORDERS:
        plan = shape.plan(Method("", _PLAN, order), cp_size)
        packs[_PLAN, order] = [layer.with_plan(plan, "all", links.ranks_per_node)]
    choice = choose_for_packs(packs, links, SplitKVOptions(query_cast="all"))
    return AutoChoice(_method_of(choice, methods), choice)


def standing_links(injection: Injection) -> Links:
    """The machine for which this run's smaller layer is what the drafter's layer is for `links`.

    Attention and bytes are smaller by `shrink`^2, projections by its square. A call of the kernel
    takes what it takes on this core, in seconds of the machine.
    """
    links, smaller = injection.links, injection.shape.shrink**2
    return replace(
        links,
        intra_bandwidth=links.intra_bandwidth / smaller,
        nic_bandwidth=links.nic_bandwidth / smaller,
        attention_flops=links.attention_flops / smaller,
        dense_flops=links.dense_flops / smaller**2,
        call_latency=injection.call_seconds / injection.slowdown,
    )


def _method_of(choice: Choice, methods: Sequence[Method]) -> Method:
    """Of the methods with the chosen strategy the one that is most like it."""
    places = choice.places.gather, choice.places.scatter
    order = block_order_of((choice.strategy,))
    alike = [
        method
        for method in methods
        if (method.strategy, method.block_order) == (choice.strategy, order)
        and (choice.strategy != "splitkv" or (method.gather, method.scatter) == places)
    ]
    return max(alike, key=lambda method: method.plan == choice.plan_strategy)
