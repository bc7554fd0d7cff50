"""``--cp-comm-type auto``: resolved once, at start, before any collective, alike on every rank."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from megatron_splitkv.attention.choice import (
    Choice,
    PlanWay,
    block_order_of,
    choose_for_packs,
    plan_cost,
)
from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.comm.links import Links
from megatron_splitkv.comm.topology import launched_ranks_per_node, split_by_node
from megatron_splitkv.config import CP_COMM_TYPES
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.packing import draw_blocks, read_pack
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import build_plan, fitting_chunks
from megatron_splitkv.plan.cost import PlanCost
from megatron_splitkv.train.arguments import splitkv_options
from megatron_splitkv.train.packing_arguments import packed_epochs

_PLANS = ("balanced", "balanced-local")
_PACKS = 8  # of the first epoch; documents and anchors as training will see them


def resolve_auto(args: argparse.Namespace, store: FeatureStore) -> str | None:
    """Replace ``auto`` in `args.cp_comm_type`, and an open `args.plan_strategy`, in place.

    What the user fixed stays. The estimates read the first packs of the store with their anchors,
    under the plans that training would give them.

    Args:
        args: completed from the store and validated by Megatron.
        store: to train on.

    Returns:
        One line that says what was chosen and why; None if nothing was left to choose.
    """
    reason = None
    if "auto" in args.cp_comm_type:
        if args.context_parallel_size == 1:
            chosen, plan = "splitkv", None
            reason = "--cp-comm-type auto chose splitkv: one rank, nothing travels"
        else:
            choice = _choose(args, store)
            chosen, plan, reason = choice.strategy, choice.plan_strategy, choice.reason
        args.cp_comm_type = [chosen if t == "auto" else t for t in args.cp_comm_type]
        args.plan_strategy = args.plan_strategy or plan
    args.plan_strategy = args.plan_strategy or _PLANS[0]
    return reason


def _choose(args: argparse.Namespace, store: FeatureStore) -> Choice:
    options = estimated_options(args)
    links = _links(args)
    packs: dict[PlanWay, Sequence[LayerShape]] = {}
    layouts = _layouts(args, store)
    beside = [name for name in args.cp_comm_type if name != "auto"]
    orders = {block_order_of((name, *beside)) for name in CP_COMM_TYPES}
    plans = (args.plan_strategy,) if args.plan_strategy else _PLANS
    for strategy, order in product(plans, sorted(orders)):
        packs[strategy, order] = [
            layer_shape(args).with_plan(
                build_plan(
                    layout,
                    context_length,
                    args.context_parallel_size,
                    strategy=strategy,
                    chunks_per_rank=fitting_chunks(
                        args.chunks_per_rank, context_length, args.context_parallel_size
                    ),
                    cost=plan_cost_of(args),
                    block_order=order,
                ),
                options.query_cast,
                links.ranks_per_node,
            )
            for layout, context_length in layouts
        ]
    return choose_for_packs(packs, links, options, beside)


def plan_cost_of(args: argparse.Namespace) -> PlanCost:
    """What plan strategy ``auto`` weighs, over the same links as every other ``auto``."""
    return plan_cost(layer_shape(args), _links(args))


def _links(args: argparse.Namespace) -> Links:
    links = splitkv_options(args).links
    assert links is not None, "the command line or the device names them"
    return links


def estimated_options(args: argparse.Namespace) -> SplitKVOptions:
    """The options that the drafter's attention will have, recomputation of it included."""
    options = splitkv_options(args)
    recomputed = args.recompute_granularity == "selective" and "core_attn" in args.recompute_modules
    return replace(options, save="own") if recomputed else options


def layer_shape(args: argparse.Namespace) -> LayerShape:
    """A layer of the drafter on one tensor-parallel rank, its rows still open."""
    tensor_parallel = args.tensor_model_parallel_size
    return LayerShape(
        query_rows=0,
        context_rows=0,
        cp_size=args.context_parallel_size,
        heads=args.num_attention_heads // tensor_parallel,
        kv_heads=args.num_query_groups // tensor_parallel,
        head_width=args.kv_channels,
        hidden_size=args.hidden_size,
        itemsize=args.params_dtype.itemsize,
        node_ranks=_node_ranks(args),
    )


def _node_ranks(args: argparse.Namespace) -> int:
    """What `comm.ranks_on_node` will say of the first context-parallel group.

    Megatron numbers tensor-parallel ranks first.
    """
    stride = args.tensor_model_parallel_size
    group = range(0, stride * args.context_parallel_size, stride)
    wanted = splitkv_options(args).ranks_per_node
    return split_by_node(group, launched_ranks_per_node() if wanted is None else wanted)


def _layouts(args: argparse.Namespace, store: FeatureStore) -> list[tuple[BlockLayout, int]]:
    """Draft blocks and context rows of the first packs."""
    packing = packed_epochs(args, store.lengths)
    layouts = []
    for item in range(min(_PACKS, packing.num_packs(0))):
        pack = read_pack(store, packing.pack_documents(item))
        layout = draw_blocks(
            pack,
            num_anchors=args.num_anchors,
            block_size=args.block_size,
            seed=args.seed,
            item_index=item,
        )
        layouts.append((layout, int(pack.cu_seqlens[-1])))
    return layouts
