"""A drafter whose partial results are added up inside nodes first: the step of the plain twin."""

from typing import Any

import pytest

from megatron_splitkv.attention import SplitKVOptions
from tests.distributed.test_drafter_places import (
    order_of_events,
    recompute_traffic,
    spec_of,
    steps,
    traffic,
)
from tests.distributed.test_drafter_step import TOLERANCE, assert_same_step, truth
from tests.distributed.test_two_levels import FAULTS
from tests.drafter.harness import TINY, StepResult, awkward_samples, on_ranks, train_step

# Ranks that import Megatron on a busy machine take their time.


def options(per_node: int, gather: str = "q", scatter: str = "heads", **more: Any) -> Any:
    return SplitKVOptions(gather, scatter, "all", ranks_per_node=per_node, **more)


PLACES = [
    options(2, gather, scatter) for gather in ("q", "hidden") for scatter in ("heads", "proj")
]
SAVE_OWN = [options(2, save="own", fp32_reduce=True), options(2, scatter="proj", save="own")]


def test_every_place_gives_the_loss_and_gradients_of_the_plain_twin() -> None:
    variants = PLACES + SAVE_OWN
    for choice, step in zip(variants, on_ranks(4, steps, variants, 1, 4)[0], strict=True):
        try:
            assert_same_step(step, truth(), TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{choice}: {error}") from error


def test_tensor_parallel_ranks_between() -> None:
    """A node of four ranks in tensor-parallel pairs holds two of each context-parallel group."""
    variants = [options(4), options(4, "hidden", "proj")]
    for step in on_ranks(8, steps, variants, 2, 4)[0]:
        assert_same_step(step, truth(), TOLERANCE)


def wrong_step(choice: SplitKVOptions, fault: str) -> StepResult:
    with FAULTS[fault]():
        return train_step(awkward_samples(), 1, 4, spec_of(choice))


@pytest.mark.parametrize("fault", ["wrong_order", "without_own_node"])
def test_wrong_variants_are_seen(fault: str) -> None:
    for choice in (PLACES[0], PLACES[-1]):
        wrong = on_ranks(4, wrong_step, choice, fault)[0]
        with pytest.raises(AssertionError):
            assert_same_step(wrong, truth(), TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gather", ["q", "hidden"])
@pytest.mark.parametrize("scatter", ["heads", "proj"])
def test_the_first_level_travels_while_context_keys_go_backward(
    gather: str, scatter: str, recompute: bool
) -> None:
    """On a CPU the second begins in the wait; on a GPU it is enqueued behind the first."""
    forward = [("launch", gather), ("compute", "context_kv"), ("wait", gather)]
    name = f"grad_{gather}"
    first = [("launch", name), ("compute", "grad_context_kv"), ("wait", name)]
    backward = [*first, ("launch", name), ("wait", name)]
    layers = TINY.num_layers
    expected = forward * layers + (forward + backward if recompute else backward) * layers
    for events in on_ranks(4, order_of_events, options(2, gather, scatter), recompute, 4):
        assert events == expected


@pytest.mark.parametrize("choice", PLACES, ids=lambda o: f"{o.gather}-{o.scatter}")
def test_labels_count_both_levels(choice: SplitKVOptions) -> None:
    """R (P - 1) rows in both levels together, n R (g - 1) inside and R (n - 1) between nodes."""
    rows = awkward_samples()[0].plan(4).num_blocks * TINY.block_size // 4
    query, hidden = TINY.num_attention_heads * TINY.head_dim, TINY.hidden_size
    widths = {
        "lse": TINY.num_attention_heads,
        "out": query if choice.scatter == "heads" else hidden,
        f"grad_{choice.gather}": query if choice.gather == "q" else hidden,
    }
    for records in on_ranks(4, traffic, choice, 1, 4):
        for label, width in widths.items():
            sent = [elements for name, elements, _ in records if name == label]
            assert sent == [2 * rows * width, rows * width] * TINY.num_layers


def test_recomputation_repeats_what_it_must_and_no_more() -> None:
    layers = TINY.num_layers
    full, full_step = on_ranks(4, recompute_traffic, None, PLACES[0])[0]
    core, core_step = on_ranks(4, recompute_traffic, ["core_attn"], PLACES[0])[0]
    none, plain_step = on_ranks(4, recompute_traffic, [], PLACES[0])[0]
    two = 2 * layers  # two levels
    assert (none["q"], none["out"], none["grad_q"]) == (layers, two, two)
    assert (core["q"], core["out"], core["grad_q"]) == (2 * layers, two, two)
    assert (full["q"], full["out"], full["grad_q"]) == (2 * layers, 2 * two, two)
    for step in (full_step, core_step):
        assert_same_step(step, plain_step, 1e-6)
