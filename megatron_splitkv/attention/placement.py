"""Where queries are gathered and outputs scattered: before or after their projections.

Both places are exact. They differ in the width of what travels (hidden size or heads x head width)
and in who projects: gathered hidden rows are projected by every rank, and so are outputs that are
scattered behind the projection. Every rank then repeats (P - 1) / P of all rows' projection work.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_splitkv.attention.options import SplitKVOptions


@dataclass(frozen=True)
class Machine:
    """What one rank can do.

    Args:
        bytes_per_second: that a rank sends while all do.
        flops: of a dense projection, per second.
    """

    bytes_per_second: float
    flops: float


# A 400 Gb/s link and dense bf16 of current GPUs; loopback and one CPU core.
MACHINES = {"cuda": Machine(50e9, 400e12), "cpu": Machine(1e9, 50e9)}


@dataclass(frozen=True)
class LayerShape:
    """What the choice depends on; rows are of all ranks, widths of one tensor-parallel rank.

    Args:
        query_rows: Q.
        context_rows: S.
        cp_size: P.
        hidden_size: d.
        query_width: heads x head width.
        key_width: key and value heads x head width, both together.
        itemsize: bytes of an element on the wire.
    """

    query_rows: int
    context_rows: int
    cp_size: int
    hidden_size: int
    query_width: int
    key_width: int
    itemsize: int


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
def choose_places(options: SplitKVOptions, shape: LayerShape, device_type: str) -> Places:
    """Choose where `options` says ``auto``: the quicker place by estimate, forward and backward.

    The gather travels while context keys and values are projected: only what exceeds that time
    counts. The scatter hides behind nothing.

    Args:
        options: what the user fixed.
        shape: of the layer and its micro-batch.
        device_type: ``cuda`` or ``cpu``.
    """
    machine = MACHINES["cpu" if device_type == "cpu" else "cuda"]
    travelling = shape.query_rows * (shape.cp_size - 1) / shape.cp_size  # rows a rank, one way
    narrow, wide = shape.hidden_size, shape.query_width

    def send(width: int) -> float:
        return 2 * travelling * width * shape.itemsize / machine.bytes_per_second

    # Forward one product, backward two.
    repeat = 3 * 2 * travelling * narrow * wide / machine.flops
    projected = shape.context_rows / shape.cp_size * shape.hidden_size * shape.key_width
    hidden_behind = 3 * 2 * projected / machine.flops
    seconds = {
        "q": max(0.0, send(wide) - hidden_behind),
        "hidden": max(0.0, send(narrow) - hidden_behind) + repeat,
        "heads": send(wide),
        "proj": send(narrow) + repeat,
    }
    if options.save == "own" or shape.cp_size == 1:
        gather = "q"
    else:
        gather = min(("q", "hidden"), key=lambda place: seconds[place])
    scatter = min(("heads", "proj"), key=lambda place: seconds[place])
    if shape.cp_size == 1:
        scatter = "heads"
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
    reason = (
        f"split-KV {steps}; estimated ms a layer, forward and backward, that no computation hides, "
        f"if all {shape.query_rows} queries went to all {shape.cp_size} ranks: {estimates}"
    )
    return Places(gather, scatter, reason)
