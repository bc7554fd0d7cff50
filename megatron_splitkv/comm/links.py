"""How fast a machine moves and computes: an alpha-beta model with two levels, nodes and ranks.

A message of n bytes takes alpha + n beta: a latency, and the bytes at a link's speed. Ranks of a
node talk over links of their own; what leaves a node goes through its network cards. Plain
arithmetic: `auto`, `splitkv scale` and `splitkv bench` all read it, and none measures here.

Source: the cost formulas of ring and tree collectives in Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (IJHPCA 2005), with the split of a
ring's steps into those inside a node and those between nodes that NCCL's tuning model uses.
"""

import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from megatron_splitkv.config import ConfigError

_COUNTS = ("nics_per_node", "ranks_per_node")
_LARGEST = 1e36  # of any number in a file: far from what arithmetic would overflow at


@dataclass(frozen=True)
class Links:
    """One machine: times in seconds, sizes in bytes, links that carry both directions at once.

    Args:
        name: what reports call it.
        intra_latency: seconds of a message inside a node.
        intra_bandwidth: bytes/s that one rank sends inside its node, one direction, while all do.
        inter_latency: seconds of a message between nodes.
        nic_bandwidth: bytes/s of one network card, one direction.
        nics_per_node: network cards that the ranks of a node share.
        ranks_per_node: ranks on one node.
        dense_flops: floating-point operations/s that a rank reaches in large matrix products.
        attention_flops: the same in its attention kernel.
        call_latency: seconds of a call of that kernel and the merge of its result, however small.

    Raises:
        ConfigError: a value that no machine has.
    """

    name: str
    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    nic_bandwidth: float
    nics_per_node: int
    ranks_per_node: int
    dense_flops: float
    attention_flops: float
    call_latency: float = 50e-6

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"links: name {self.name!r} must be a text of at least one letter")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            kinds = (int,) if field.name in _COUNTS else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "a whole number" if field.name in _COUNTS else "a number"
                raise ConfigError(f"links: {field.name} {value!r} must be {kind}")
            if math.inf > value > _LARGEST:
                raise ConfigError(f"links: {field.name} must be at most {_LARGEST:g}")
            lowest_is_zero = field.name.endswith("latency")
            if not math.isfinite(value) or value < 0 or (value == 0 and not lowest_is_zero):
                limit = "zero or more" if lowest_is_zero else "more than zero"
                raise ConfigError(f"links: {field.name} {value!r} must be finite and {limit}")

    # The topology that P ranks see

    def ranks_in_node(self, ranks: int) -> int:
        """Ranks that share a node when `ranks` fill nodes one after the other."""
        return min(ranks, self.ranks_per_node)

    def nodes(self, ranks: int) -> int:
        """Nodes of `ranks` ranks."""
        return -(-ranks // self.ranks_per_node)

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s that leave a node through all of its cards, one direction."""
        return self.nic_bandwidth * self.nics_per_node

    @property
    def inter_bandwidth(self) -> float:
        """Bytes/s that one rank sends to other nodes, one direction, while all ranks do."""
        return self.node_bandwidth / self.ranks_per_node

    def collective_seconds(self, op: str, sent: float, ranks: int) -> float:
        """One collective, from what `comm.meter` says that each of P ranks sends in it.

        Args:
            op: of the meter, or ``reduce_scatter`` or ``all_reduce``; not ``shift``, which is no
                matter of all ranks.
            sent: bytes of one rank; of the busiest where ranks send unevenly.
            ranks: P, two or more.

        Raises:
            ValueError: another op.
        """
        whole = sent * ranks / (ranks - 1)  # of a buffer of which a rank sends all but its part
        match op:
            case "all_gather":
                return self.all_gather_seconds(whole, ranks)
            case "reduce_scatter":
                return self.reduce_scatter_seconds(whole, ranks)
            case "all_to_all" | "all_to_all_v" | "all_gather_v":  # uneven shards go pair by pair
                return self.all_to_all_seconds(whole, ranks)
            case "all_reduce" | "all_reduce_max" | "all_reduce_sum":  # counted there and back
                return self.all_reduce_seconds(whole / 2, ranks)
            case "broadcast" | "reduce_sum":
                return self.broadcast_seconds(whole, ranks)
            case "all_to_all_inside":
                return self.all_to_all_v_seconds(sent, 0.0, self.ranks_in_node(ranks))
            case "all_to_all_between":
                latency = (self.nodes(ranks) - 1) * self.inter_latency
                return latency + sent / self.inter_bandwidth
        raise ValueError(f"{op} has no price among all ranks of a group")

    # Times of patterns

    def all_gather_seconds(self, nbytes: float, ranks: int) -> float:
        """Ring all-gather: every edge of the ring carries all but one part.

        Args:
            nbytes: of the gathered whole.
            ranks: P.
        """
        if ranks == 1:
            return 0.0
        sent = nbytes * (ranks - 1) / ranks
        return self._ring_latency(ranks) + sent / self._ring_bandwidth(ranks)

    def reduce_scatter_seconds(self, nbytes: float, ranks: int) -> float:
        """Ring reduce-scatter of `nbytes` a rank: the mirror of the all-gather."""
        return self.all_gather_seconds(nbytes, ranks)

    def all_to_all_seconds(self, nbytes: float, ranks: int) -> float:
        """All-to-all of equal parts.

        Args:
            nbytes: of one rank's whole buffer, its own part included.
            ranks: P.
        """
        part, near = nbytes / ranks, self.ranks_in_node(ranks)
        return self.all_to_all_v_seconds(part * (near - 1), part * (ranks - near), ranks)

    def all_to_all_v_seconds(self, intra_bytes: float, inter_bytes: float, ranks: int) -> float:
        """All-to-all of any parts, pairwise; bytes inside and between nodes flow side by side.

        Args:
            intra_bytes: what the busiest rank sends to ranks of its node.
            inter_bytes: what the busiest rank sends to other nodes.
            ranks: P.
        """
        near = self.ranks_in_node(ranks)
        latency = (near - 1) * self.intra_latency + (ranks - near) * self.inter_latency
        return latency + max(intra_bytes / self.intra_bandwidth, inter_bytes / self.inter_bandwidth)

    def all_reduce_seconds(self, nbytes: float, ranks: int) -> float:
        """All-reduce of `nbytes` a rank: the faster of a ring and a tree.

        The ring is a reduce-scatter and an all-gather. Both move the buffer about twice; the tree
        has logarithmic latency.
        """
        if ranks == 1:
            return 0.0
        ring = 2 * self.all_gather_seconds(nbytes, ranks)
        near, nodes = self.ranks_in_node(ranks), self.nodes(ranks)
        hops = math.ceil(math.log2(near)) * self.intra_latency
        hops += math.ceil(math.log2(nodes)) * self.inter_latency
        return min(ring, 2 * (hops + nbytes / self._ring_bandwidth(ranks)))

    def broadcast_seconds(self, nbytes: float, ranks: int) -> float:
        """Broadcast of `nbytes` down a pipelined chain of ranks; a reduce to one rank likewise."""
        if ranks == 1:
            return 0.0
        return self._ring_latency(ranks) + nbytes / self._ring_bandwidth(ranks)

    def ring_hop_seconds(self, nbytes: float, ranks: int) -> float:
        """Every rank sends `nbytes` to the next one; the slowest edge is the one between nodes.

        One rank of a node sends to another node, so it has a whole card for itself.
        """
        if ranks == 1:
            return 0.0
        inside = self.intra_latency + nbytes / self.intra_bandwidth
        if self.nodes(ranks) == 1:
            return inside
        return max(inside, self.inter_latency + nbytes / self.nic_bandwidth)

    def _ring_latency(self, ranks: int) -> float:
        nodes = self.nodes(ranks)
        return (ranks - nodes) * self.intra_latency + (nodes - 1) * self.inter_latency

    def _ring_bandwidth(self, ranks: int) -> float:
        """A ring, split over all cards of a node, runs at its slowest edge."""
        if self.nodes(ranks) == 1:
            return self.intra_bandwidth
        inside = self.intra_bandwidth if self.ranks_per_node > 1 else math.inf
        return min(inside, self.node_bandwidth)

    # Files

    def to_json(self) -> str:
        """A JSON object with the fields as keys."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`.

        Raises:
            ConfigError: not a JSON object, a key too few or too many, or a bad value.
        """
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"links: not JSON ({error})") from error
        names = [field.name for field in fields(cls)]
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(values, dict):
            raise ConfigError(f"links: not a JSON object; its keys must be {', '.join(names)}")
        wrong = sorted((needed - set(values)) | (set(values) - set(names)))
        if wrong:
            what = "lacks" if wrong[0] in needed else "does not know"
            raise ConfigError(f"links: {what} {wrong[0]!r}; the keys are {', '.join(names)}")
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, which is whole or untouched."""
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(self.to_json() + "\n")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: naming the file.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error


# Sustained speeds, not peaks; `splitkv bench links` measures a machine's own.
_NVLINK = Links(
    name="nvlink-400g",
    intra_latency=4e-6,
    intra_bandwidth=300e9,  # 600 GB/s, both directions counted
    inter_latency=12e-6,
    nic_bandwidth=50e9,  # 400 Gb/s
    nics_per_node=8,
    ranks_per_node=8,
    dense_flops=500e12,
    attention_flops=300e12,
)
PRESETS: dict[str, Links] = {
    links.name: links
    for links in (
        _NVLINK,
        replace(_NVLINK, name="nvlink-400g-shared", nics_per_node=1),
        Links(
            name="pcie-ethernet",
            intra_latency=10e-6,
            intra_bandwidth=20e9,
            inter_latency=40e-6,
            nic_bandwidth=12.5e9,  # 100 Gb/s
            nics_per_node=1,
            ranks_per_node=8,
            dense_flops=150e12,
            attention_flops=80e12,
        ),
        Links(
            name="loopback",
            intra_latency=150e-6,
            intra_bandwidth=1e9,
            inter_latency=150e-6,
            nic_bandwidth=1e9,
            nics_per_node=1,
            ranks_per_node=4096,  # all ranks are processes of one machine
            dense_flops=40e9,
            attention_flops=15e9,
        ),
    )
}


def default_links(device_type: str) -> Links:
    """The preset for a device that nobody has measured."""
    return PRESETS["loopback" if device_type == "cpu" else "nvlink-400g"]


def links_from(name_or_path: str) -> Links:
    """Return a preset by its name, or the links of a file.

    Raises:
        ConfigError: neither, or a bad file.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).is_file():
        raise ConfigError(
            f"links {name_or_path!r} is neither a file nor one of: {', '.join(PRESETS)}"
        )
    return Links.load(name_or_path)
