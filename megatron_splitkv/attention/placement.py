"""Where queries are gathered and outputs scattered: before or after their projections.

Both places are exact. They differ in the width of what travels (hidden size or heads x head width)
and in who projects: gathered hidden rows are projected by every rank, and so are outputs that are
scattered behind the projection. Every rank then repeats the projection of the rows that it attends
and does not own.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_splitkv.attention.layer_shape import LayerShape
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.strategies.volumes import Move, volume
from megatron_splitkv.attention.transfers import links_with_nodes, move_seconds, node_ranks
from megatron_splitkv.comm.links import Links


@dataclass(frozen=True)
class Places:
    """The choice for one layer.

    Args:
        gather: ``q`` or ``hidden``.
        scatter: ``heads`` or ``proj``.
        reason: one line that says why.
    """

    gather: str
    scatter: str
    reason: str


@lru_cache(maxsize=256)
def choose_places(options: SplitKVOptions, shape: LayerShape, links: Links) -> Places:
    """Choose where `options` says ``auto``: the quicker place by estimate, forward and backward.

    Args:
        options: what the user fixed.
        shape: of the layer and its micro-batch.
        links: the machine.
    """
    alone = shape.cp_size == 1
    seconds = place_seconds(options, shape, links)
    gathers = ("q",) if options.save == "own" or alone else ("q", "hidden")
    gather = min(gathers, key=lambda place: seconds[place])
    scatter = min(("heads",) if alone else ("heads", "proj"), key=lambda place: seconds[place])
    if shape.hidden_size == 0:  # no projection in sight
        gather, scatter = "q", "heads"
    gather = gather if options.gather == "auto" else options.gather
    scatter = scatter if options.scatter == "auto" else options.scatter
    chosen = {
        f"gathers {gather}": options.gather == "auto",
        f"scatters {scatter}": options.scatter == "auto",
    }
    steps = " and ".join(
        f"{step} ({'by estimate' if by_us else 'as asked'})" for step, by_us in chosen.items()
    )
    estimates = ", ".join(f"{place} {1e3 * s:.3g}" for place, s in seconds.items())
    whom = (
        f"if all {shape.query_rows} queries went to all {shape.cp_size} ranks"
        if shape.load is None
        else f"for {shape.query_rows} queries on {shape.cp_size} ranks"
    )
    reason = (
        f"split-KV {steps}; estimated ms a layer, forward and backward, that no computation hides, "
        f"{whom}, over links {links.name}: {estimates}"
    )
    return Places(gather, scatter, reason)


def place_seconds(options: SplitKVOptions, shape: LayerShape, links: Links) -> dict[str, float]:
    """What each place costs a rank in one layer, forward and backward.

    What is gathered travels while keys and values are projected, and its gradient comes back while
    these go backward: only what exceeds that time counts. The scatter hides behind nothing.

    Args:
        options: of them `fp32_reduce`; `save`: own queries are gathered twice; `ranks_per_node`: 1
            keeps returns on one level where the machine has two, if the shape does not know.
        shape: of the layer.
        links: the machine.

    Returns:
        Seconds by place: ``q``, ``hidden``, ``heads``, ``proj``.
    """
    ranks, load = shape.cp_size, shape.loaded
    links, near = links_with_nodes(links, shape.node_ranks), shape.node_ranks
    if near is None:
        near = 1 if options.ranks_per_node == 1 else node_ranks(links, ranks)
    rows = (shape.context_rows + shape.query_rows) / ranks
    key_width = 2 * shape.kv_heads * shape.head_width
    behind = 2 * rows * shape.hidden_size * key_width / links.dense_flops  # forward
    repeated = max(0, load.attended_rows - shape.query_rows // ranks)
    # Forward one product, backward two.
    repeat = 3 * 2 * repeated * shape.hidden_size * shape.query_width / links.dense_flops

    def of(move: Move) -> float:
        if options.fp32_reduce and move.label in ("out", "grad_q", "grad_hidden"):
            move = replace(move, itemsize=max(4, move.itemsize))
        return move_seconds(move, links, ranks, far_share=load.far_share)

    def total(gather: str, scatter: str) -> tuple[float, float]:
        moved = volume("splitkv", shape.traffic(gather, scatter, near))
        cast: defaultdict[str, float] = defaultdict(float)
        for move in (*moved.forward.moves, *moved.backward.moves):
            cast[move.label] += of(move)
        there, back = cast.pop(gather, 0.0), cast.pop(f"grad_{gather}", 0.0)
        again = there if options.save == "own" else 0.0
        exposed = max(0.0, there - behind) + max(0.0, back - 2 * behind) + again
        return exposed, sum(cast.values())

    (q, heads), (hidden, proj) = total("q", "heads"), total("hidden", "proj")
    return {"q": q, "hidden": hidden + repeat, "heads": heads, "proj": proj + repeat}
