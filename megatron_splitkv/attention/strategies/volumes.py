"""What each strategy moves in one layer, to the element: tests, choices and cost models read it.

Elements are what one rank sends, by the convention of `comm.meter`. What our strategies move is
asserted against the meter; `published` is what the papers' tables count, which is a little more:
there keys and values of the own draft blocks travel with those of the context, where here they stay
with their queries.

Source:
    Split-KV, Table 1, generalised to grouped heads; call counts as in the authors' own code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_splitkv.attention.merge import accumulator_dtype
from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan import ContextPlan


@dataclass(frozen=True)
class TrafficShape:
    """What the volume of one layer depends on.

    Args:
        query_rows: Q, over all ranks, padding blocks included; a multiple of `cp_size`.
        context_rows: S, over all ranks.
        cp_size: P.
        heads: query heads of one tensor-parallel rank.
        kv_heads: its key and value heads.
        head_width: d.
        itemsize: bytes of an element of q, k and v.
        sum_itemsize: bytes of an element of a running sum: 4, and 8 for fp64.
        shards: context rows of each rank, if they differ.
        hidden_size: of the model; only `splitkv` behind or before its projections needs it.
        gather: of `splitkv`: ``q`` or ``hidden``.
        scatter: of `splitkv`: ``heads`` or ``proj``.
        query_cast: of `splitkv`: ``all`` or ``group``, as the plan resolves it.
        query_share: of a group-cast: share of the other ranks that a query goes to.
        node_ranks: of `splitkv`: ranks on each node if returns take two levels, 1 if they take one.
    """

    query_rows: int
    context_rows: int
    cp_size: int
    heads: int
    kv_heads: int
    head_width: int
    itemsize: int = 2
    sum_itemsize: int = 4
    shards: tuple[int, ...] | None = None
    hidden_size: int = 0
    gather: str = "q"
    scatter: str = "heads"
    query_cast: str = "all"
    query_share: float = 1.0
    node_ranks: int = 1

    @classmethod
    def of_plan(
        cls,
        plan: ContextPlan,
        *,
        heads: int,
        kv_heads: int,
        head_width: int,
        dtype: torch.dtype,
        query_cast: str = "auto",
    ) -> "TrafficShape":
        """The shape of a layer under a plan, with its shards and its mean share of queries.

        Args:
            plan: of the micro-batch.
            heads: query heads of one tensor-parallel rank.
            kv_heads: its key and value heads.
            head_width: d.
            dtype: of q, k and v.
            query_cast: of `splitkv`; ``auto`` is resolved for ranks without nodes.
        """
        query_cast = plan.resolve_cast(query_cast)
        ranks = range(plan.cp_size)
        attended = sum(plan.query_cast(rank, query_cast).blocks.size for rank in ranks)
        most = plan.num_blocks * (plan.cp_size - 1)
        shards = tuple(plan.num_rows(rank) for rank in ranks)
        return cls(
            query_rows=plan.num_blocks * plan.block_size,
            context_rows=sum(shards),
            cp_size=plan.cp_size,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            itemsize=dtype.itemsize,
            sum_itemsize=accumulator_dtype(dtype).itemsize,
            shards=shards,
            query_cast=query_cast,
            query_share=(attended - plan.num_blocks) / most if most else 1.0,
        )

    @property
    def takes_two_levels(self) -> bool:
        """Whether partial results are added up inside nodes before they leave them."""
        return 1 < self.node_ranks < self.cp_size and self.query_cast == "all"

    def rows_of(self, rank: int) -> float:
        """Context rows of a rank, any integer modulo P."""
        if self.shards is None:
            return self.context_rows / self.cp_size
        return self.shards[rank % self.cp_size]


@dataclass(frozen=True)
class Move:
    """One tensor that moves in a layer, all its hops together.

    Args:
        label: as the meter names it.
        op: the collective, as the meter names it; of two levels each is a move.
        elements: that one rank sends.
        itemsize: bytes of an element.
        calls: collectives.
    """

    label: str
    op: str
    elements: float
    itemsize: int
    calls: int = 1


@dataclass(frozen=True)
class Traffic:
    """One direction, forward or backward.

    Args:
        moves: by tensor.
        serial_steps: communication steps of which each needs the one before, what hides behind
            computation included.
    """

    moves: tuple[Move, ...] = field(default=())
    serial_steps: int = 0

    @property
    def elements(self) -> float:
        """Elements that one rank sends."""
        return sum(move.elements for move in self.moves)

    @property
    def bytes(self) -> float:
        """Bytes that one rank sends."""
        return sum(move.elements * move.itemsize for move in self.moves)

    @property
    def calls(self) -> int:
        """Collectives, and point-to-point transfers per tensor."""
        return sum(move.calls for move in self.moves)

    def elements_of(self, itemsize: int) -> float:
        """Elements of one width."""
        return sum(move.elements for move in self.moves if move.itemsize == itemsize)


@dataclass(frozen=True)
class Volume:
    """Both directions of one layer on one rank."""

    forward: Traffic
    backward: Traffic

    @property
    def bytes(self) -> float:
        """Bytes that the rank sends, forward and backward."""
        return self.forward.bytes + self.backward.bytes


def volume(strategy: str, shape: TrafficShape, *, rank: int = 0, published: bool = False) -> Volume:
    """What a rank sends in one layer.

    Args:
        strategy: one of `config.CP_COMM_TYPES`.
        shape: of the layer and its micro-batch.
        rank: whose, where shards are uneven.
        published: as the strategies' papers count it, instead of what ours move.

    Raises:
        ConfigError: unknown strategy.
    """
    if strategy not in _FORMULAS:
        raise ConfigError(
            f"strategy {strategy!r} has no formula; choose one of: {', '.join(_FORMULAS)}"
        )
    if shape.cp_size == 1:
        return Volume(Traffic(), Traffic())
    return _FORMULAS[strategy](shape, rank, published)


def _splitkv(s: TrafficShape, rank: int, published: bool) -> Volume:
    rows = s.query_rows * (s.cp_size - 1) / s.cp_size * s.query_share
    heads, query = rows * s.heads, rows * s.heads * s.head_width
    hidden = rows * s.hidden_size
    gathered = query if s.gather == "q" else hidden
    behind = s.scatter == "proj"
    returned = hidden if behind else query
    e, a = s.itemsize, s.sum_itemsize
    cast = "all_gather" if s.query_cast == "all" else "all_to_all_v"
    if published:  # statistics by all-reduce, sums by reduce-scatter
        forward = [
            Move(s.gather, cast, gathered, e),
            Move("lse", "all_reduce", 4 * heads, a, 2),
            Move("out", "reduce_scatter", returned, e),
        ]
        backward = [
            Move("grad_out", cast, returned, e),
            Move("delta", "all_reduce", 2 * heads, a),
            Move(f"grad_{s.gather}", "reduce_scatter", gathered, e),
        ]
        return Volume(Traffic(tuple(forward), 4), Traffic(tuple(backward), 3))
    total = [Move("lse_total", cast, heads, a)] if behind else []
    forward = [
        Move(s.gather, cast, gathered, e),
        *_returned(s, "lse", heads, a),
        *total,
        *_returned(s, "out", returned, e),
    ]
    backward = [
        Move("grad_out", cast, returned, e),
        *_returned(s, f"grad_{s.gather}", gathered, e),
    ]
    if not behind:
        backward.append(Move("lse_and_delta", cast, 2 * heads, a))
    elif s.query_cast == "all":
        backward.append(Move("delta", "all_reduce_sum", 2 * heads, a))
    else:
        backward += [Move("delta", cast, heads, a), Move("delta_total", cast, heads, a)]
    steps = (4, 3) if behind else (2, 2)
    if s.takes_two_levels:  # a step more for each return but that of lse beside out
        steps = (6, 4) if behind else (3, 3)
    return Volume(Traffic(tuple(forward), steps[0]), Traffic(tuple(backward), steps[1]))


def _returned(s: TrafficShape, label: str, elements: float, itemsize: int) -> tuple[Move, ...]:
    """What goes to the owners of the rows, of which one level would send so many elements."""
    if not s.takes_two_levels:
        op = "all_to_all" if s.query_cast == "all" else "all_to_all_v"
        return (Move(label, op, elements, itemsize),)
    per_rank, nodes = elements / (s.cp_size - 1), s.cp_size // s.node_ranks
    inside, between = nodes * (s.node_ranks - 1) * per_rank, (nodes - 1) * per_rank
    return (
        Move(label, "all_to_all_inside", inside, itemsize),
        Move(label, "all_to_all_between", between, itemsize),
    )


def _ulysses(s: TrafficShape, rank: int, published: bool) -> Volume:
    """All rows of all ranks for a share of the heads; beyond n_kv ranks they share key heads."""
    others, own = s.cp_size - 1, s.query_rows / s.cp_size
    query = others * own * s.heads / s.cp_size * s.head_width
    keys = max(1, s.kv_heads / s.cp_size) * s.head_width
    sent = others * (s.rows_of(rank) + own) * keys
    returned = (s.context_rows - s.rows_of(rank) + others * own) * keys
    op, e = "all_to_all", s.itemsize

    def direction(names: tuple[str, str, str, str], key_elements: float) -> Traffic:
        sizes = (query, key_elements, key_elements, query)
        uneven = ("all_to_all", f"{op}_v", f"{op}_v", "all_to_all")
        moves = zip(names, uneven, sizes, strict=True)
        return Traffic(tuple(Move(n, o, elements, e) for n, o, elements in moves), 2)

    return Volume(
        direction(("q", "k", "v", "out"), sent),
        direction(("grad_q", "grad_k", "grad_v", "grad_out"), returned),
    )


def _ring(s: TrafficShape, rank: int, published: bool) -> Volume:
    """Keys and values pass every rank; their gradients start and end at the owner."""
    hops, width = s.cp_size, s.kv_heads * s.head_width
    everything = s.context_rows + (s.query_rows if published else 0)
    # All shards but that which comes from the next rank, where it began.
    passed = everything * (hops - 1) / hops if published else everything - s.rows_of(rank + 1)
    keys = tuple(Move(n, "shift", passed * width, s.itemsize, hops - 1) for n in ("k", "v"))
    gradients = tuple(
        Move(n, "shift", everything * width, s.sum_itemsize, hops) for n in ("grad_k", "grad_v")
    )
    return Volume(Traffic(keys, hops - 1), Traffic(keys + gradients, hops))


def _ringx(s: TrafficShape, rank: int, published: bool) -> Volume:
    """Turns: the queries of each rank forward, its keys and values backward."""
    turns, share = s.cp_size, (s.cp_size - 1) / s.cp_size
    heads = s.query_rows * s.heads * share
    keys = (s.context_rows + (s.query_rows if published else 0)) * s.kv_heads * s.head_width
    forward = (
        Move("q", "broadcast", heads * s.head_width, s.itemsize, turns),
        Move("lse_max", "all_reduce_max", 2 * heads, s.sum_itemsize, turns),
        Move("numerator", "reduce_sum", heads * s.head_width, s.sum_itemsize, turns),
        Move("denominator", "reduce_sum", heads, s.sum_itemsize, turns),
    )
    backward = (
        Move("kv", "broadcast", 2 * keys * share, s.itemsize, turns),
        Move("grad_kv", "reduce_sum", 2 * keys * share, s.sum_itemsize, turns),
    )
    return Volume(Traffic(forward, 3 * turns), Traffic(backward, 2 * turns))


def _lv_xattn(s: TrafficShape, rank: int, published: bool) -> Volume:
    """Queries pass every rank; running outputs and gradients start and end at the owner."""
    hops = s.cp_size
    heads = s.query_rows * s.heads
    query, share = heads * s.head_width, (hops - 1) / hops
    e, a = s.itemsize, s.sum_itemsize
    forward = (
        Move("q", "shift", query * share, e, hops - 1),
        Move("out", "shift", query, e if published else a, hops),
        Move("lse", "shift", heads, a, hops),
    )
    backward = (
        *(Move(n, "shift", query * share, e, hops - 1) for n in ("q", "out", "grad_out")),
        Move("lse", "shift", heads * share, a, hops - 1),
        Move("grad_q", "shift", query, e if published else a, hops),
    )
    return Volume(Traffic(forward, hops), Traffic(backward, hops))


def _all_gather(s: TrafficShape, rank: int, published: bool) -> Volume:
    """Every rank gets all keys and values, and returns a gradient for each."""
    width = s.kv_heads * s.head_width
    everything = s.context_rows + (s.query_rows if published else 0)
    own = everything / s.cp_size if published else s.rows_of(rank)
    sent, returned = own * (s.cp_size - 1) * width, (everything - own) * width

    def direction(names: tuple[str, str], op: str, elements: float) -> Traffic:
        return Traffic(tuple(Move(n, op, elements, s.itemsize) for n in names), 1)

    return Volume(
        direction(("k", "v"), "all_gather_v", sent),
        direction(("grad_k", "grad_v"), "all_to_all_v", returned),
    )


_FORMULAS: dict[str, Callable[[TrafficShape, int, bool], Volume]] = {
    "splitkv": _splitkv,
    "a2a": _ulysses,
    "p2p": _ring,
    "ringx": _ringx,
    "lv_xattn": _lv_xattn,
    "all_gather": _all_gather,
}
