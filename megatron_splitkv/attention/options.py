"""What a user may choose about split-KV's communication, and the right defaults."""

from dataclasses import dataclass

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
            are then gathered again.
        fp32_reduce: partial outputs and partial dq travel in fp32, twice the bytes, instead of the
            dtype of the queries. They are added in fp32 either way.

    Raises:
        ConfigError: an unknown name, or hidden rows gathered twice.
    """

    gather: str = "auto"
    scatter: str = "auto"
    query_cast: str = "auto"
    save: str = "gathered"
    fp32_reduce: bool = False

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
