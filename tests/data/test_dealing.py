"""Replicas of a step have equally much to do, and a step has the packs that it would have had."""

import pickle
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.dealing import Dealing, deal
from megatron_splitkv.data.packing import PackedEpochs

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 3000).astype(np.int64), 2, 512)
COSTS = LENGTHS**2 + 200 * LENGTHS
PACKING = PackedEpochs(LENGTHS, 512, seed=3)


def _loads(costs: np.ndarray, dealt: np.ndarray, replicas: int) -> np.ndarray:
    return costs[dealt].reshape(-1, replicas).sum(axis=0)


def test_small_cases_by_hand() -> None:
    # 9 with 1 and 6 with 5 for two replicas; each replica's items ascend.
    costs = np.array([6, 9, 1, 5])
    assert deal(costs, 2).tolist() == [1, 0, 2, 3]
    assert _loads(costs, deal(costs, 2), 2).tolist() == [10, 11]
    assert deal(np.array([3, 3, 3, 3]), 2).tolist() == [0, 1, 2, 3]
    assert deal(np.array([2, 1]), 2).tolist() == [0, 1]
    assert deal(np.array([2, 1, 7]), 1).tolist() == [0, 1, 2]


def test_an_exchange_mends_what_the_greedy_way_leaves() -> None:
    """Largest first: 9 + 5 + 5 and 8 + 7 + 2, which stand at 19 and 17 until 9 goes for 8."""
    costs = np.array([9, 8, 7, 5, 5, 2])
    assert sorted(_loads(costs, deal(costs, 2), 2).tolist()) == [18, 18]


@pytest.mark.parametrize("replicas", [2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 4, 16])
def test_every_item_once_and_loads_even(replicas: int, rounds: int) -> None:
    costs = np.random.default_rng(1).integers(50, 151, replicas * rounds) * 10**15
    dealt = deal(costs, replicas)
    assert sorted(dealt.tolist()) == list(range(costs.size))
    loads, before = (_loads(costs, x, replicas) for x in (dealt, np.arange(costs.size)))
    assert loads.max() <= before.max()
    if rounds >= 4:
        assert loads.max() < 1.03 * loads.mean()


def _steps(
    replicas: int, batch: int, steps: int, start: int = 0, period: int | None = None
) -> Iterator[list[list[int]]]:
    """Items of every step and replica, as Megatron's sampler hands them out."""
    dealing = Dealing(
        PACKING, COSTS, start=start, global_batch_size=batch, num_replicas=replicas, period=period
    )
    for first in range(start, start + steps * batch, batch):
        yield [
            [dealing.item(i) for i in range(first + r, first + batch, replicas)]
            for r in range(replicas)
        ]


def _cost(items: list[int]) -> int:
    return sum(int(COSTS[PACKING.pack_documents(item)].sum()) for item in items)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_step_holds_its_canonical_packs_whatever_the_replicas(replicas: int) -> None:
    for step, hands in enumerate(_steps(replicas, 16, steps=30)):
        assert {len(hand) for hand in hands} == {16 // replicas}
        assert sorted(chain(*hands)) == list(range(16 * step, 16 * step + 16))


def test_the_busiest_replica_is_relieved() -> None:
    def excess(hands: list[list[int]]) -> float:
        costs = [_cost(hand) for hand in hands]
        return max(costs) / (sum(costs) / len(costs)) - 1

    dealt = np.mean([excess(hands) for hands in _steps(4, 16, steps=20)])
    plain = np.mean(
        [excess([list(range(16 * s + r, 16 * s + 16, 4)) for r in range(4)]) for s in range(20)]
    )
    assert dealt < 0.06 < 0.17 < plain


def test_other_replicas_and_batches_go_on_where_the_first_stood() -> None:
    """Five steps of 16 packs, then steps of 12 for 3 replicas: nothing twice, nothing left out."""
    items = [item for hands in _steps(4, 16, steps=5) for hand in hands for item in hand]
    for step, hands in enumerate(_steps(3, 12, steps=4, start=80)):
        assert sorted(chain(*hands)) == list(range(80 + 12 * step, 92 + 12 * step))
        items += chain(*hands)
    assert sorted(items) == list(range(80 + 48))


def test_a_resumed_run_deals_as_the_uninterrupted_one() -> None:
    whole = list(_steps(4, 16, steps=8))
    assert list(_steps(4, 16, steps=3, start=80)) == whole[5:]


def test_items_depend_on_the_index_alone() -> None:
    dealing = Dealing(PACKING, COSTS, start=0, global_batch_size=16, num_replicas=4)
    ascending = [dealing.item(i) for i in range(64)]
    again = pickle.loads(pickle.dumps(dealing))
    assert [again.item(i) for i in reversed(range(64))] == ascending[::-1]
    assert ascending != list(range(64))


def test_every_evaluation_is_dealt_alike() -> None:
    steps = [[[i % 24 for i in hand] for hand in hands] for hands in _steps(4, 8, 6, period=24)]
    assert steps[:3] == steps[3:]
    assert sorted(chain(*chain(*steps[:3]))) == list(range(24))
    # Where the evaluations' size changed between two runs they begin in the middle of the period.
    late = [[i % 24 for i in hand] for s in _steps(4, 8, 3, start=20, period=24) for hand in s]
    assert sorted(chain(*late)) == list(range(24))


def test_replicas_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 packs cannot be dealt to 3 data-parallel replicas"):
        Dealing(PACKING, COSTS, start=0, global_batch_size=16, num_replicas=3)
