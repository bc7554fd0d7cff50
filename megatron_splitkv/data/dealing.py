"""Which replica of a data-parallel job gets which packs of a global batch: those of equal cost.

Megatron's sampler hands item i of every D consecutive ones to replica i of D. So the items of a
global batch, rearranged among themselves, are dealt to the replicas as we like, and a step, which
lasts as long as its busiest replica, sees the packs that it would have seen. A pack keeps its
canonical index, and with it its anchors: losses and gradients of a step do not depend on the
number of replicas.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.packing import PackedEpochs

_IDLEST = 8  # replicas that may relieve the busiest


class Dealing:
    """Rearranges the items of each global batch so that replicas have equally much to do.

    Batches are counted from the first item that is asked for: a resumed run with other replicas or
    another batch size goes through the canonical order from where the first one stood.

    Args:
        packing: the canonical order.
        document_cost: see `PackCost.of_documents`.
        start: items that were consumed before, where the first global batch begins.
        global_batch_size: packs of a step over all replicas.
        num_replicas: data-parallel size.
        period: items repeat after so many, see `PackDataset`.

    Shape:
        document_cost: int64 ``[num_documents]``.

    Raises:
        ConfigError: the replicas do not divide the batch.
    """

    def __init__(
        self,
        packing: PackedEpochs,
        document_cost: NDArray[np.int64],
        *,
        start: int,
        global_batch_size: int,
        num_replicas: int,
        period: int | None = None,
    ) -> None:
        if global_batch_size % num_replicas:
            raise ConfigError(
                f"a global batch of {global_batch_size} packs cannot be dealt to {num_replicas} "
                "data-parallel replicas; use a multiple"
            )
        self.packing = packing
        self.document_cost = document_cost
        self.start = start
        self.global_batch_size = global_batch_size
        self.num_replicas = num_replicas
        self.period = period
        # Only a memo of the batch that was asked for last.
        self._dealt: tuple[int, NDArray[np.int64]] | None = None

    def item(self, index: int) -> int:
        """The canonical item that takes the place of an index of the sampler.

        Args:
            index: of the sampler.
        """
        batch, place = divmod(index - self.start, self.global_batch_size)
        if self._dealt is None or self._dealt[0] != batch:
            self._dealt = batch, deal(self._costs(batch), self.num_replicas)
        return self.start + batch * self.global_batch_size + int(self._dealt[1][place])

    def _costs(self, batch: int) -> NDArray[np.int64]:
        items = self.start + batch * self.global_batch_size + np.arange(self.global_batch_size)
        if self.period is not None:
            items %= self.period
        packs = (self.packing.pack_documents(int(item)) for item in items)
        return np.array([self.document_cost[pack].sum() for pack in packs], dtype=np.int64)


def deal(costs: NDArray[np.int64], num_replicas: int) -> NDArray[np.int64]:
    """Deal items to replicas, equally many to each and of even cost.

    The dearest item first, each to the replica that has least to do and still has room; then
    exchanges between the busiest replica and the idlest ones, as long as one helps.

    Args:
        costs: of the items.
        num_replicas: a divisor of their number.

    Returns:
        int64 ``[G]``: the item at place ``k * num_replicas + r`` is the k-th of replica r. Each
        replica has its items in ascending order.

    Shape:
        costs int64 ``[G]``.
    """
    rounds = costs.size // num_replicas
    loads = [(0, replica) for replica in range(num_replicas)]
    hands: list[list[int]] = [[] for _ in range(num_replicas)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, replica = heapq.heappop(loads)
        hands[replica].append(item)
        if len(hands[replica]) < rounds:
            heapq.heappush(loads, (load + int(costs[item]), replica))
    dealt = np.array(hands, dtype=np.int64)
    _exchange(costs, dealt)
    dealt.sort(axis=1)
    return dealt.T.reshape(-1)


def _exchange(costs: NDArray[np.int64], dealt: NDArray[np.int64]) -> None:
    """Relieve the busiest replica by one exchange after the other, in place."""
    while True:
        loads = costs[dealt].sum(axis=1)
        busy = int(loads.argmax())
        idle = np.argsort(loads, kind="stable")[:_IDLEST]
        idle = idle[idle != busy]
        # Item i of the busy one against item j of another: the larger of their loads behind it.
        moved = costs[dealt[busy]][:, None, None] - costs[dealt[idle]]
        after = np.maximum(loads[busy] - moved, loads[idle][:, None] + moved)
        if after.size == 0 or after.min() >= loads[busy]:
            return
        give, other, take = np.unravel_index(int(after.argmin()), after.shape)
        place = (idle[other], take)
        dealt[busy, give], dealt[place] = dealt[place], dealt[busy, give]
