"""What attention asks of a plan: who holds which keys, and which of them each query row sees."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.plan.query_cast import QueryCast
from megatron_splitkv.plan.staircase import DEFAULT_LEAF_LIMITS, LeafLimits, Staircase

# All-to-all-v beats an all-gather that moves a little more only when it moves clearly less.
_GROUP_CAST_SHARE = 0.75


class AttentionPlan(ABC):
    """Rows of queries and keys over the ranks of a context-parallel group.

    Queries come in blocks of `block_size` rows; every rank owns N / P consecutive blocks. Keys are
    held by ranks in any way; "local" keys are a rank's, in the order of its tensors. Every query
    row sees one contiguous range of each rank's local keys, and perhaps keys of its own block,
    which its owner holds apart.

    Pure data, the same on every rank. What is derived from it is built once and kept.
    """

    cp_size: int
    """P, ranks of the group."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """B, query rows a block."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """N, query blocks of all ranks; a multiple of P."""

    @abstractmethod
    def num_rows(self, rank: int) -> int:
        """Keys that the rank holds, those of its own blocks not counted."""

    @abstractmethod
    def needs(self, window: int | None = None) -> NDArray[np.bool_]:
        """Whether a rank holds keys that a block sees.

        Shape:
            bool[P, N].
        """

    @abstractmethod
    def build_staircase(
        self, rank: int, blocks: NDArray[np.int64], limits: LeafLimits, window: int | None
    ) -> Staircase:
        """Visibility of the rank's keys to these blocks, in this order; see `staircase`."""

    @abstractmethod
    def build_own_staircase(self, rank: int, window: int | None) -> Staircase | None:
        """See `own_staircase`."""

    @property
    def blocks_per_rank(self) -> int:
        """N / P."""
        return self.num_blocks // self.cp_size

    def check_cp_size(self, cp_size: int) -> None:
        """Refuse a group of another size.

        Raises:
            ConfigError: naming both sizes.
        """
        if self.cp_size != cp_size:
            raise ConfigError(
                f"the plan is for {self.cp_size} context-parallel ranks, the group has {cp_size}; "
                "build it with the group's size"
            )

    def resolve_cast(self, cast: str, window: int | None = None, node_ranks: int = 1) -> str:
        """Which cast `auto` is: ``group`` if the busiest rank then attends clearly fewer blocks.

        Between nodes that may be the wrong measure: a cast to all sends a row to a node once and
        adds up inside it what goes back, where each rank of a group-cast sends and gets rows of its
        own. With several ranks a node fewer rows must cross between nodes, too.

        Args:
            cast: ``all``, ``group`` or ``auto``.
            window: of the layer; a short one leaves few ranks with keys that a block sees.
            node_ranks: ranks on each of several nodes, if a cast to all returns by two levels; 1 if
                it does not. As the run has it: see `comm.ranks_on_node`.
        """
        if cast != "auto" or self.cp_size == 1:
            return "all" if self.cp_size == 1 else cast

        def resolve() -> str:
            needs = self._kept(("needs", window), lambda: self.needs(window))
            by_owner = needs.reshape(self.cp_size, self.cp_size, -1).sum(axis=2)
            np.fill_diagonal(by_owner, self.blocks_per_rank)  # a rank attends all of its own
            fewer = bool(by_owner.sum(axis=1).max() <= _GROUP_CAST_SHARE * self.num_blocks)
            if fewer and node_ranks > 1:
                fewer = self._crosses_less(by_owner, node_ranks)
            return "group" if fewer else "all"

        return self._kept(("resolve", window, node_ranks), resolve)

    def _crosses_less(self, by_owner: NDArray[np.int64], node_ranks: int) -> bool:
        """Whether the busiest rank's blocks between nodes, there and back, are clearly fewer.

        Args:
            by_owner: blocks that each rank attends, by their owner.
            node_ranks: g. A cast to all is a ring over all cards of a node, of which a rank's share
                is 1 / g of the blocks; what returns is a rank's own blocks for each other node.
        """
        node = np.arange(self.cp_size) // node_ranks
        far = by_owner * (node[:, None] != node)
        group = int(far.sum(axis=0).max() + far.sum(axis=1).max())
        ring = self.num_blocks * (self.cp_size - 1) / self.cp_size / node_ranks
        returned = (self.cp_size // node_ranks - 1) * self.blocks_per_rank
        return group <= _GROUP_CAST_SHARE * (ring + returned)

    def query_cast(self, rank: int, cast: str = "all", window: int | None = None) -> QueryCast:
        """Which blocks the rank attends and what travels for it.

        Args:
            rank: whose cast.
            cast: ``all`` (every rank attends every block), ``group`` (only those of which it holds
                keys, and its own) or ``auto``.
            window: of the layer.
        """
        cast = self.resolve_cast(cast, window)
        if cast == "all":
            return self._kept(
                ("cast", rank),
                lambda: QueryCast.of_all(rank, self.cp_size, self.blocks_per_rank),
            )
        needs = self._kept(("needs", window), lambda: self.needs(window))
        return self._kept(("cast", rank, window), lambda: QueryCast.of_needs(rank, needs))

    def staircase(
        self,
        rank: int,
        limits: LeafLimits = DEFAULT_LEAF_LIMITS,
        *,
        window: int | None = None,
        cast: str = "all",
    ) -> Staircase:
        """The rank's visible (query row, local key) pairs as dense rectangles and leaves.

        Args:
            rank: whose keys.
            limits: when a corner stays whole; a kernel's choice.
            window: of the layer, None for full attention.
            cast: its blocks are those of `query_cast(rank, cast, window)`.
        """
        cast = self.resolve_cast(cast, window)
        return self._kept(
            ("staircase", rank, limits, window, cast),
            lambda: self.build_staircase(
                rank, self.query_cast(rank, cast, window).blocks, limits, window
            ),
        )

    def pair_staircase(
        self, keys_of: int, queries_of: int, limits: LeafLimits, window: int | None = None
    ) -> Staircase:
        """Visibility of one rank's keys to one rank's own blocks, not counting keys of the blocks.

        Args:
            keys_of: the rank whose keys.
            queries_of: the rank whose blocks.
            limits: see `staircase`.
            window: of the layer.
        """
        own = np.arange(self.blocks_per_rank) + queries_of * self.blocks_per_rank
        return self._kept(
            ("pair", keys_of, queries_of, limits, window),
            lambda: self.build_staircase(keys_of, own, limits, window),
        )

    def own_staircase(self, rank: int, window: int | None = None) -> Staircase | None:
        """Visibility of the rank's own blocks to themselves: its own rows, and keys of those rows.

        Returns:
            None if the plan has no keys of that kind.
        """
        return self._kept(("own", rank, window), lambda: self.build_own_staircase(rank, window))

    @cached_property
    def _derived(self) -> dict[Hashable, object]:
        return {}

    def _kept[T](self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._derived:
            self._derived[key] = build()
        value: T = self._derived[key]  # type: ignore[assignment]
        return value
