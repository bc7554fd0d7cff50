"""What a user may choose about split-KV's communication, and the right defaults."""

from dataclasses import dataclass

from megatron_splitkv.comm.links import Links, default_links
from megatron_splitkv.config import (
    GATHER_PLACES,
    QUERY_CASTS,
    SAVE_POLICIES,
    SCATTER_PLACES,
    ConfigError,
    require_choice,
)


@dataclass(frozen=True)
class SplitKVOptions:
    """Where and how split-KV communicates. Every choice is exact; they differ in bytes and memory.

    Args:
        gather: what is gathered: ``q`` (projected queries), ``hidden`` (the rows before the query
            projection, which every rank then repeats) or ``auto`` (the quicker by estimate).
        scatter: what goes back: ``heads`` (attention output, projected by its owner), ``proj``
            (after the output projection, which every rank repeats) or ``auto``.
        query_cast: who gets which queries: ``all``, ``group`` (only ranks that hold keys which the
            query sees) or ``auto`` (``group`` where that moves clearly less).
        save: what is kept for backward: the ``gathered`` queries, or only the rank's ``own``, which
            are then gathered again. With the strategy `all_gather`: keys and values instead.
        fp32_reduce: partial outputs and partial dq travel in fp32, twice the bytes, instead of the
            dtype of the queries. They are added in fp32 either way.
        links: the machine that every ``auto`` estimates for; None: a preset for the device.
        ranks_per_node: processes of the job on each node, numbered node by node. Partial results
            of queries that went to all ranks are added up inside a node before they leave it; 1:
            they are not. None: what the launcher says (torchrun's ``LOCAL_WORLD_SIZE``).

    Raises:
        ConfigError: an unknown name, hidden rows gathered twice, or no rank on a node.
    """

    gather: str = "auto"
    scatter: str = "auto"
    query_cast: str = "auto"
    save: str = "gathered"
    fp32_reduce: bool = False
    links: Links | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        require_choice("--splitkv-gather", self.gather, GATHER_PLACES)
        require_choice("--splitkv-scatter", self.scatter, SCATTER_PLACES)
        require_choice("--splitkv-query-cast", self.query_cast, QUERY_CASTS)
        require_choice("--splitkv-save", self.save, SAVE_POLICIES)
        if self.save == "own" and self.gather == "hidden":
            raise ConfigError(
                "--splitkv-save own gathers projected queries again in backward; use it with "
                "--splitkv-gather q"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(
                f"--splitkv-ranks-per-node {self.ranks_per_node} must be at least 1, which returns "
                "partial results by one level"
            )

    def check_strategy(self, strategy: str) -> None:
        """Refuse choices that mean nothing for a strategy.

        Args:
            strategy: one of `config.CP_COMM_TYPES`.

        Raises:
            ConfigError: naming the first such choice.
        """
        own = self.of_strategy(strategy)
        for name, value in vars(self).items():
            if value != getattr(own, name):
                option = f"--splitkv-{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option if value is True else f'{option} {value}'} means nothing for "
                    f"--cp-comm-type {strategy}; drop it, or use --cp-comm-type splitkv"
                )

    def of_strategy(self, strategy: str) -> "SplitKVOptions":
        """These options without those that mean nothing for a strategy."""
        if strategy in ("splitkv", "auto"):
            return self
        save = self.save if strategy == "all_gather" else "gathered"
        return SplitKVOptions(save=save, links=self.links)

    def links_on(self, device_type: str) -> Links:
        """`links`, or the preset for a device."""
        return default_links(device_type) if self.links is None else self.links

    def require_projected(self) -> None:
        """Refuse places on the other side of projections that the caller does not see.

        Raises:
            ConfigError: hidden rows are to be gathered, or projected outputs scattered.
        """
        for name, place, plain in (
            ("gather", self.gather, "q"),
            ("scatter", self.scatter, "heads"),
        ):
            if place not in ("auto", plain):
                raise ConfigError(
                    f"--splitkv-{name} {place} needs the projections, which attention from "
                    f"projected tensors does not see; use {plain}, or the drafter's attention"
                )
