"""Bytes of split-KV attention on one rank, tensor by tensor, before anything is allocated.

Three questions of one attention layer: what stays until backward, and what is alive at the worst
moment of its forward and of its backward. Projections, norms and the multi-layer perceptron around
it are the model's, with one exception: what `gather` and `scatter` move behind or before the
projections is counted here, because it is P times as large as without context parallelism.

Not counted: inputs of the layer (this rank's q, k, v and the gradient of its output), parameters,
what a kernel or the communication library keeps inside a call.

Shape legend: Q query rows of all ranks, A of them attended by this rank, R owned by it (Q / P), S
context rows, K of them here (S / P), n_q and n_kv heads, d head width, all of one tensor-parallel
rank.
"""

from dataclasses import dataclass

from megatron_splitkv.attention.merge import PART_ELEMENTS
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.config import ConfigError

Tensors = dict[str, int]
"""Bytes by tensor."""


@dataclass(frozen=True)
class AttentionSizes:
    """What the memory of a layer follows from.

    Args:
        query_rows: Q.
        context_rows: S.
        cp_size: P.
        heads: n_q.
        kv_heads: n_kv.
        head_dim: d.
        hidden_size: width of the hidden rows, which travel for ``hidden`` and ``proj``.
        itemsize: bytes of an activation.
        cast_share: A / Q; below 1 for the query cast ``group``.
        options: `gather` and `scatter` resolved, not ``auto``; `query_cast` is not read.
        kernel: ``te``, ``flash`` (one call a level on whole tensors) or ``cpu``.
        tile: rows and keys of the largest rectangle of the staircase; (A, K) if None. Only the cpu
            kernel needs it.
    """

    query_rows: int
    context_rows: int
    cp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    itemsize: int = 2
    cast_share: float = 1.0
    options: SplitKVOptions = SplitKVOptions(gather="q", scatter="heads")
    kernel: str = "te"
    tile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if "auto" in (self.options.gather, self.options.scatter):
            raise ConfigError(
                "the memory of a layer depends on gather and scatter: resolve 'auto' first"
            )
        if self.kernel not in ("cpu", "te", "flash"):
            raise ConfigError(f"kernel {self.kernel!r} has no memory model; use cpu, te or flash")

    @property
    def own(self) -> int:
        """R."""
        return self.query_rows // self.cp_size

    @property
    def attended(self) -> int:
        """A."""
        return self.query_rows if self.cp_size == 1 else round(self.query_rows * self.cast_share)

    @property
    def keys(self) -> int:
        """K."""
        return -(-self.context_rows // self.cp_size)

    @property
    def query_width(self) -> int:
        """n_q * d."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """n_kv * d."""
        return self.kv_heads * self.head_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes of a number that adds up."""
        return max(4, self.itemsize)

    @property
    def wire_itemsize(self) -> int:
        """Bytes of a number of a partial result on its way."""
        return self.sum_itemsize if self.options.fp32_reduce else self.itemsize


@dataclass(frozen=True)
class AttentionMemory:
    """The inventory.

    Args:
        saved: kept from forward to backward, a layer; what is the layer's input aside.
        forward: what is alive at each moment that can be the worst of the forward.
        backward: likewise of the backward, `saved` included.
        published: elements of the published estimate, 2 (S + Q) H / P + 2 Q H with H the query
            width: inputs, outputs and communication buffers, with as many key as query heads.
    """

    saved: Tensors
    forward: dict[str, Tensors]
    backward: dict[str, Tensors]
    published: int

    @property
    def saved_bytes(self) -> int:
        """Sum of `saved`."""
        return sum(self.saved.values())

    @property
    def forward_peak(self) -> tuple[str, int]:
        """The worst moment of the forward and its bytes."""
        return _worst(self.forward)

    @property
    def backward_peak(self) -> tuple[str, int]:
        """The worst moment of the backward and its bytes."""
        return _worst(self.backward)

    def model_peak(self, layers: int) -> int:
        """Worst bytes of a model of such layers: the backward of the last one.

        Args:
            layers: all saved what this one saves.
        """
        return (layers - 1) * self.saved_bytes + max(self.forward_peak[1], self.backward_peak[1])


def attention_memory(sizes: AttentionSizes) -> AttentionMemory:
    """The inventory of one attention layer on one rank.

    Args:
        sizes: of the layer, the micro-batch and the choices.
    """
    s = sizes
    saved = _saved(s)
    return AttentionMemory(
        saved=saved,
        forward=_forward(s),
        backward=_backward(s, saved),
        published=(
            2 * (s.context_rows + s.query_rows) * s.query_width // s.cp_size
            + 2 * s.query_rows * s.query_width
        ),
    )


def _gathered(s: AttentionSizes) -> Tensors:
    """Attended rows, in the forms that are alive while they are attended."""
    if s.cp_size == 1:
        return {}
    tensors = {"queries": s.attended * s.query_width * s.itemsize}
    if s.options.gather == "hidden":
        tensors["hidden rows"] = s.attended * s.hidden_size * s.itemsize
    return tensors


def _saved(s: AttentionSizes) -> Tensors:
    gathered = {} if s.options.save == "own" else _gathered(s)
    whole = s.options.scatter == "heads"
    rows = s.own if whole else s.attended
    return gathered | {
        "output" if whole else "share of the output": rows * s.query_width * s.itemsize,
        "lse": rows * s.heads * s.sum_itemsize,
    }


def _forward(s: AttentionSizes) -> dict[str, Tensors]:
    """Attend the context; attend the own blocks; round and send what came out."""
    gathered = _gathered(s)
    partial = _outputs(s, s.attended, "partial")
    moments = {
        "context": gathered | partial | _context_call(s, operands=1),
        "own blocks": gathered | partial | _outputs(s, s.own, "own") | _own_call(s, operands=1),
    }
    if s.cp_size == 1:
        return moments
    lses = {"lse, sent and received": 2 * s.attended * s.heads * s.sum_itemsize}
    if s.options.scatter == "heads":
        sent = s.attended * s.query_width * s.wire_itemsize
        moments["return"] = gathered | lses | {"outputs sent": sent, "outputs received": sent}
        if s.wire_itemsize < s.sum_itemsize:
            moments["rounding"] = gathered | partial | lses | {"outputs sent": sent}
    else:
        share = {"share of the output": s.attended * s.query_width * s.itemsize}
        moments["rounding"] = gathered | partial | lses | share
        moments["return"] = gathered | lses | share | _travelling(s, s.hidden_size, s.itemsize)
    return moments


def _backward(s: AttentionSizes, saved: Tensors) -> dict[str, Tensors]:
    """Cast; make the carrier; attend context, then own blocks; send dq to the owners."""
    queries = s.attended * s.query_width
    statistic = s.attended * s.heads * s.sum_itemsize
    alive = saved | _gathered(s)
    if s.options.scatter == "heads":
        alive["lse and delta"] = 2 * statistic
    else:
        alive["delta"] = statistic
    if s.cp_size > 1:
        alive["output gradients"] = queries * s.itemsize
    carrier = {"delta carrier": queries * s.itemsize}
    grad_q = {"query gradients": queries * s.sum_itemsize}
    context, own = (2 * rows * s.key_width for rows in (s.keys, s.own))
    part = min(queries, max(PART_ELEMENTS, s.query_width))
    moments = {
        # |dO| or dO / |dO| and its square, beside dO as a sum's dtype if that is another.
        "carrier": alive
        | carrier
        | {"part of the carrier": (2 + (s.itemsize < s.sum_itemsize)) * part * s.sum_itemsize},
        "context": alive
        | carrier
        | grad_q
        | {"lse, finite": statistic, "key gradients, summed": context * s.sum_itemsize}
        | _context_call(s, operands=3),
        "own blocks": alive
        | carrier
        | grad_q
        | {
            "key gradients": context * s.itemsize,
            "own query gradients": s.own * s.query_width * s.sum_itemsize,
            "own key gradients, summed": own * s.sum_itemsize,
        }
        | _own_call(s, operands=3),
    }
    if s.options.scatter == "proj":
        # The product of dO and the share, and both as a sum's dtype if that is another.
        copies = 1 if s.itemsize == s.sum_itemsize else 3
        moments["delta"] = alive | {"products": copies * part * s.sum_itemsize}
    if s.cp_size > 1:
        gone = {"output gradients"} | (_gathered(s).keys() - saved.keys())
        done = {name: size for name, size in alive.items() if name not in gone}
        done["key gradients"] = (context + own) * s.itemsize
        if s.options.gather == "q":
            moments["return"] = done | _travelling(s, s.query_width, s.sum_itemsize)
        else:
            rounded = {"query gradients, rounded": queries * s.itemsize}
            moments["rounding"] = done | grad_q | rounded
            moments["return"] = done | rounded | _travelling(s, s.hidden_size, s.itemsize)
    return moments


def _outputs(s: AttentionSizes, rows: int, name: str) -> Tensors:
    return {
        f"{name} output": rows * s.query_width * s.sum_itemsize,
        f"{name} lse": rows * s.heads * s.sum_itemsize,
    }


def _travelling(s: AttentionSizes, width: int, itemsize: int) -> Tensors:
    """Partial rows of `itemsize`, their copy for the wire if that needs one, and what arrives."""
    elements = s.attended * width
    copy = {} if itemsize == s.wire_itemsize else {"rows sent": elements * s.wire_itemsize}
    return {
        "partial rows": elements * itemsize,
        "rows received": elements * s.wire_itemsize,
    } | copy


def _context_call(s: AttentionSizes, operands: int) -> Tensors:
    """What one call over context keys makes beside the sums."""
    rows, keys = (s.attended, s.keys) if s.tile is None else s.tile
    if s.kernel != "cpu":
        rows, keys = s.attended, s.keys
    return _call(s, rows, keys, operands, gathered=s.kernel == "flash")


def _own_call(s: AttentionSizes, operands: int) -> Tensors:
    """What the call over the own blocks makes; the cpu kernel gathers so small rectangles."""
    return _call(s, s.own, s.own, operands, gathered=s.kernel != "te")


def _call(s: AttentionSizes, rows: int, keys: int, operands: int, *, gathered: bool) -> Tensors:
    """Operands that a call copies, and its results.

    Args:
        rows: query rows of the call.
        keys: key rows of the call.
        operands: 1 forward (q), 3 backward (q, dO and the carrier).
        gathered: rows are copied from where they lie.
    """
    operand = operands * rows * s.query_width + 2 * keys * s.key_width
    result = rows * s.query_width + (2 * keys * s.key_width if operands > 1 else 0)
    copied = s.kernel == "cpu" and s.itemsize < s.sum_itemsize
    tensors = {
        "call's results": result * (s.sum_itemsize if s.kernel == "cpu" else s.itemsize),
        "call's rows in fp32": operand * s.sum_itemsize * copied,
        "call's rows, gathered": operand * s.itemsize * (gathered and not copied),
        "call's lse": rows * s.heads * s.sum_itemsize,
    }
    return {name: size for name, size in tensors.items() if size}


def _worst(moments: dict[str, Tensors]) -> tuple[str, int]:
    totals = {moment: sum(tensors.values()) for moment, tensors in moments.items()}
    name = max(totals, key=lambda moment: totals[moment])
    return name, totals[name]
