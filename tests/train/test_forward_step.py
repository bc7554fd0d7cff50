"""What a forward step checks, reads ahead and logs besides the model's own report."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import CommMeter, all_reduce_sum
from megatron_splitkv.comm.meter import _ENTERED
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import gloo_pool, subgroup
from tests.train.launches import make_store
from tests.train.test_dataset import RECIPE, _dataset, _plan


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return make_store(tmp_path / "store")


def _compare(plans: list[dict[str, object]], ranks: list[int]) -> tuple[str, int, bool]:
    """The refusal, how many collectives there were, and whether this rank is to speak of it."""
    from megatron_splitkv.train.same_plan import PlansDifferError, check_same_plan

    group = subgroup(ranks)
    if dist.get_rank() not in ranks:
        return "", 0, False
    plan = ContextPlan.from_arrays(plans[group.rank()])
    with CommMeter() as meter:
        try:
            check_same_plan(plan, group)
        except PlansDifferError as error:
            return str(error), meter.calls(), error.speaker
    return "", meter.calls(), False


def test_ranks_with_other_plans_are_named_on_every_rank_alike(store: FeatureStore) -> None:
    dataset = _dataset(store, 0, 2)
    one, item = _plan(dataset[0]), _plan(dataset[1])
    strategy = build_plan(
        one.layout, one.context_length, 2, strategy="none", chunks_per_rank=RECIPE.chunks_per_rank
    )
    rebuilt = ContextPlan.from_arrays(one.to_arrays())
    cases = (
        ([one, rebuilt, one, one], [0, 1, 2, 3], ""),
        ([one, item, one, one], [0, 1, 2, 3], "rank 1"),
        ([item, one, one, one], [0, 1, 2, 3], "rank 0"),
        ([one, item, strategy, one], [0, 1, 2, 3], "ranks 1, 2"),
        ([one, item, item, one], [0, 1, 2, 3], "ranks 1, 2"),  # a tie
        ([one, item], [1, 3], "rank 3"),  # numbers of the whole job
    )
    for plans, ranks, expected in cases:
        answers = gloo_pool(4).run(_compare, [plan.to_arrays() for plan in plans], ranks)
        messages, calls, speakers = zip(*(answers[rank] for rank in ranks), strict=True)
        assert set(calls) == {1}
        assert len(set(messages)) == 1
        if expected:
            rest = (
                " drew other anchors or another plan, or would communicate otherwise, than the "
                f"rest of the {len(ranks)} ranks"
            )
            assert messages[0].startswith(expected + rest)
            # One line, whether or not the node's first rank is among them.
            assert speakers == (True, *[False] * (len(ranks) - 1))
        else:
            assert messages[0] == ""


def _compare_ways(plan: dict[str, object], ways: list[str]) -> str:
    from megatron_splitkv.train.same_plan import PlansDifferError, check_same_plan

    group = subgroup([0, 1, 2])
    if dist.get_rank() == 3:
        return ""
    try:
        check_same_plan(ContextPlan.from_arrays(plan), group, ways[group.rank()])
    except PlansDifferError as error:
        return str(error)
    return ""


def test_ranks_that_would_communicate_otherwise_are_named(store: FeatureStore) -> None:
    plan = _plan(_dataset(store, 0, 3)[0]).to_arrays()
    same = gloo_pool(4).run(_compare_ways, plan, ["splitkv over 2"] * 3)
    assert same == [""] * 4
    ways = ["splitkv over 2", "splitkv over 2", "splitkv over 1"]
    answers = gloo_pool(4).run(_compare_ways, plan, ways)[:3]
    assert len(set(answers)) == 1
    assert answers[0].startswith("rank 2 drew other anchors or another plan, or would communicate")


def _host_group() -> tuple[str, list[int], int, bool]:
    from megatron_splitkv.train.same_plan import host_group

    halves = [subgroup([0, 2]), subgroup([1, 3])]
    mine = halves[dist.get_rank() % 2]
    assert host_group(mine) is mine
    assert host_group(None) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda _: "nccl")
        group = host_group(mine)
    assert group is not None
    assert group is not mine
    answer = all_reduce_sum(torch.tensor([dist.get_rank()]), group, label="ranks")
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)
    dist.destroy_process_group(group)
    return backend, ranks, int(answer), group.rank() == mine.rank()


def test_plans_are_compared_by_the_host_beside_a_gpu_group() -> None:
    for rank, answer in enumerate(gloo_pool(4).run(_host_group)):
        assert answer == ("gloo", [rank % 2, rank % 2 + 2], 2 + 2 * (rank % 2), True)


class _Drafter(torch.nn.Module):
    """As much of a drafter as a forward step asks for; its pass is one collective."""

    def __init__(self) -> None:
        super().__init__()
        self.pg_collection = SimpleNamespace(tp_cp=dist.group.WORLD)
        options = SimpleNamespace(query_cast="all", ranks_per_node=None)
        attention = SimpleNamespace(options=options, strategy="splitkv", node_ranks=1)
        layer = SimpleNamespace(self_attention=attention)
        self.decoder = SimpleNamespace(layers=[layer])
        self.dflash = SimpleNamespace(num_layers=1)
        self.communication = "splitkv"
        self.passes = 0

    def places(self, plan: ContextPlan) -> Any:
        return SimpleNamespace(reason="as the test wants it")

    def forward(self, batch: dict[str, torch.Tensor], plan: ContextPlan) -> Any:
        self.passes += 1
        loss = all_reduce_sum(torch.ones(()), dist.group.WORLD, label="loss").requires_grad_()
        return loss, torch.tensor(1), {"lm loss": torch.ones(2)}


class _Timers:
    def __call__(self, *_: Any, **__: Any) -> "_Timers":
        return self

    def start(self) -> None:
        pass

    stop = start


def _items(folder: Path, wrong: tuple[int, int] | None) -> Iterator[dict[str, torch.Tensor]]:
    """Collated packs; the wrong rank gets another one at one step."""
    dataset = _dataset(FeatureStore(folder), dist.get_rank(), dist.get_world_size())
    for step in range(6):
        other = wrong == (dist.get_rank(), step)
        yield {name: tensor[None] for name, tensor in dataset[step + 10 * other].items()}


def _train(folder: Path, wrong: tuple[int, int] | None) -> tuple[int, str, list[str], list[str]]:
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron_splitkv.train.forward_step import ForwardStep

    step = ForwardStep(_Timers(), lambda: 0.0)  # type: ignore[arg-type]
    drafter = _Drafter()
    iterator = RerunDataIterator(_items(folder, wrong))
    message, sent, logged = "", [], []
    try:
        while True:
            with CommMeter() as meter:
                try:
                    _, finish = step(iterator, drafter)  # type: ignore[arg-type]
                    logged = list(finish(torch.ones(()))[2])
                finally:
                    sent = [record.label for record in meter.records]
    except ConfigError as error:
        message = str(error)
    except StopIteration:
        pass
    step.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)  # type: ignore[call-overload]
    assert not _ENTERED
    return drafter.passes, message, sent, logged


def test_a_dropped_step_no_longer_counts() -> None:
    from megatron_splitkv.train.forward_step import ForwardStep

    before = len(_ENTERED)
    step = ForwardStep(_Timers())  # type: ignore[arg-type]
    assert len(_ENTERED) == before + 1
    del step
    assert len(_ENTERED) == before


def test_another_plan_at_any_step_stops_every_rank_before_anything_else_is_sent(
    store: FeatureStore,
) -> None:
    for passes, message, sent, _ in gloo_pool(4).run(_train, store.path, (2, 3)):
        assert passes == 3
        assert message.startswith(
            "rank 2 drew other anchors or another plan, or would communicate otherwise, than the "
            "rest of the 4 "
        )
        assert sent == ["plan_digest"]


def test_a_step_logs_its_wait_and_compares_plans_once(store: FeatureStore) -> None:
    for passes, message, _, logged in gloo_pool(4).run(_train, store.path, None):
        assert (passes, message) == (6, "")
        assert logged == [
            "drafter loss",
            "trained tokens per pack",
            "plan imbalance",
            "plan wait ms",
            "bytes per layer",
        ]


def test_a_replayed_step_sees_its_own_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack that was read ahead is not among those that Megatron replays."""
    from megatron.core import rerun_state_machine

    from megatron_splitkv.batch import Prefetch
    from megatron_splitkv.train.forward_step import read_ahead

    machine = SimpleNamespace(get_mode=lambda: "validate_results")
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    iterator = rerun_state_machine.RerunDataIterator(iter([{"pack": i} for i in range(9)]))

    def take(count: int) -> list[int]:
        packs = []
        for _ in range(count):
            read_ahead(iterator)  # type: ignore[arg-type]
            packs.append(next(iterator)["pack"])  # type: ignore[call-overload]
        return packs

    assert take(2) == [0, 1]
    wrapped = iterator.iterable
    assert isinstance(wrapped, Prefetch)
    iterator.rewind()
    assert take(2) == [0, 1]
    iterator.advance()
    assert take(3) == [2, 3, 4]
    iterator.rewind()
    assert take(3) == [2, 3, 4]
    iterator.advance()
    assert take(1) == [5]
    assert iterator.iterable is wrapped
    wrapped.close()


def test_iterators_of_others_are_left_as_they_are() -> None:
    from megatron_splitkv.train.forward_step import read_ahead

    plain = iter([{"pack": torch.ones(1)}] * 3)
    read_ahead(plain)
    assert len(list(plain)) == 3


@pytest.mark.parametrize(
    ("reported", "logged"),
    [
        ("lm loss", "drafter loss"),
        ("slot_1_accuracy", "accuracy/slot 1"),
        ("slot_15_accuracy", "accuracy/slot 15"),
        ("accept_len", "accept_len"),
    ],
)
def test_names_in_the_log(reported: str, logged: str) -> None:
    from megatron_splitkv.train.forward_step import _log_name

    assert _log_name(reported) == logged


def test_the_first_line_says_when_ranks_per_node_has_no_effect() -> None:
    from megatron_splitkv.attention import SplitKVOptions
    from megatron_splitkv.train.forward_step import _how_queries_travel

    layout = BlockLayout([3, 5, 7, 9], [0, 0, 0, 0], [True] * 4, 2)
    plan = build_plan(layout, 16, 4)

    def said(cast: str, asked: int | None, near: int) -> str:
        options = SplitKVOptions(query_cast=cast, ranks_per_node=asked)
        return _how_queries_travel(plan, options, near)

    assert "no effect" not in said("all", 2, 2) + said("all", None, 1) + said("all", 1, 1)
    assert said("all", 4, 1).endswith(
        "; --splitkv-ranks-per-node 4 has no effect: 4 context-parallel ranks are not several "
        "nodes of equally many ranks with 4 ranks of the job on each"
    )
    assert "2 has no effect: what returns to few ranks takes one level" in said("group", 2, 2)
