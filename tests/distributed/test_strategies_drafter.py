"""One step of the drafter under every strategy: loss and all gradients of the plain twin."""

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_splitkv.attention.strategies.volumes import TrafficShape, volume
from megatron_splitkv.comm import CommMeter
from megatron_splitkv.config import CP_COMM_TYPES, ConfigError
from tests.distributed.test_drafter_step import TOLERANCE, assert_same_step, truth
from tests.drafter.harness import (
    TINY,
    StepResult,
    awkward_samples,
    build_model,
    data_parallel,
    on_ranks,
    parallel_state,
    run_schedule,
    train_step,
)

# Ranks that import Megatron on a busy machine take their time.

PEERS = CP_COMM_TYPES[1:]
# Query and key heads of TINY are 4 and 2: Ulysses cannot deal them out to 3 ranks.
LAYOUTS = {
    (4, 1, 2): PEERS,
    (3, 1, 3): tuple(name for name in PEERS if name != "a2a"),
    (4, 1, 4): PEERS,
    (4, 2, 2): PEERS,
}
ids = [f"tp{tp}-cp{cp}" for _, tp, cp in LAYOUTS]


def steps(types: Sequence[str | list[str]], tp: int, cp: int) -> list[StepResult]:
    samples = awkward_samples()
    return [train_step(samples, tp, cp, {"cp_comm_type": name}) for name in types]


@pytest.mark.parametrize(("ranks", "tp", "cp"), LAYOUTS, ids=ids)
def test_every_strategy_gives_the_loss_and_gradients_of_the_plain_twin(
    ranks: int, tp: int, cp: int
) -> None:
    types: list[str | list[str]] = list(LAYOUTS[ranks, tp, cp])
    if cp == 4:  # a strategy a layer; the first alone does not say what all need
        types += [["splitkv", "p2p"], ["lv_xattn", "splitkv"]]
    for name, step in zip(types, on_ranks(ranks, steps, types, tp, cp)[0], strict=True):
        try:
            assert_same_step(step, truth(), TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def counted(types: Sequence[str], recompute: dict[str, Any]) -> list[tuple[int, StepResult]]:
    """Calls of a layer and micro-batch, forward and backward, and the step."""
    from megatron_splitkv.attention.strategies import LAYER_LABELS

    samples = awkward_samples()
    found = []
    for name in types:
        with parallel_state(1, 4):
            ddp = data_parallel(build_model(1, 4, cp_comm_type=name, **recompute))
            with CommMeter() as meter:
                step = run_schedule(ddp, samples)
        calls = sum(record.label in LAYER_LABELS for record in meter.records)
        assert calls % (TINY.num_layers * len(samples)) == 0
        found.append((calls // (TINY.num_layers * len(samples)), step))
    return found


def test_calls_equal_the_formula_with_and_without_recomputation() -> None:
    core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    shape = TrafficShape(4, 4, 4, TINY.num_attention_heads, TINY.num_key_value_heads, TINY.head_dim)
    for name, recompute in (("none", {}), ("core_attn", core), ("full", full)):
        for peer, (calls, step) in zip(
            PEERS, on_ranks(4, counted, PEERS, recompute)[0], strict=True
        ):
            assert_same_step(step, truth(), TOLERANCE)
            layer = volume(peer, shape)
            # Core attention keeps what travelled, but for keys and values of the whole context.
            again = name == "full" or (name == "core_attn" and peer == "all_gather")
            expected = layer.forward.calls * (1 + again) + layer.backward.calls
            assert calls == expected, (name, peer)


def build(name: str, tp: int, cp: int) -> str:
    with parallel_state(tp, cp):
        try:
            build_model(tp, cp, cp_comm_type=name)
        except ConfigError as error:
            return str(error)
    return ""


def test_heads_that_ulysses_cannot_deal_out_are_refused_when_the_model_is_built() -> None:
    for message in on_ranks(3, build, "a2a", 1, 3):
        assert "4 query heads" in message
        assert "among 3 ranks" in message
    assert TINY.num_attention_heads == 4
