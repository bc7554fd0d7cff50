"""Queries gathered and outputs scattered on either side of their projections: one drafter."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from megatron_splitkv.attention import SplitKVOptions
from megatron_splitkv.comm import CommMeter, mark
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

PLACES = [
    SplitKVOptions(gather=gather, scatter=scatter, query_cast=cast)
    for gather, scatter, cast in product(("q", "hidden"), ("heads", "proj"), ("all", "group"))
]
SAVE_OWN = [
    SplitKVOptions(gather="q", scatter=scatter, query_cast=cast, save="own")
    for scatter, cast in (("heads", "group"), ("proj", "all"))
]


def spec_of(options: SplitKVOptions) -> dict[str, Any]:
    from megatron_splitkv.drafter import get_dflash_layer_spec

    return {"model_args": {"layer_spec": get_dflash_layer_spec("local", splitkv=options)}}


def steps(variants: Sequence[SplitKVOptions], tp: int, cp: int) -> list[StepResult]:
    return [train_step(awkward_samples(), tp, cp, spec_of(options)) for options in variants]


@pytest.mark.parametrize(("ranks", "tp", "cp"), [(3, 1, 3), (4, 1, 4), (4, 2, 2)])
def test_every_place_gives_the_loss_and_gradients_of_the_plain_twin(
    ranks: int, tp: int, cp: int
) -> None:
    variants = PLACES + SAVE_OWN
    for options, step in zip(variants, on_ranks(ranks, steps, variants, tp, cp)[0], strict=True):
        try:
            assert_same_step(step, truth(), TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{options}: {error}") from error


def without_output_sum(options: SplitKVOptions) -> StepResult:
    """Scatter behind the projection, without the sum over the ranks' shares."""
    from megatron_splitkv.comm import RowExchange

    right = RowExchange.sum

    def first_share(self: RowExchange, contributions: torch.Tensor, dtype: Any) -> torch.Tensor:
        return contributions[: self.own_rows].to(dtype)

    RowExchange.sum = first_share  # type: ignore[method-assign]
    try:
        return train_step(awkward_samples(), 1, 2, spec_of(options))
    finally:
        RowExchange.sum = right  # type: ignore[method-assign]


def test_a_missing_sum_is_seen() -> None:
    wrong = on_ranks(4, without_output_sum, SplitKVOptions(gather="q", scatter="proj"))[0]
    with pytest.raises(AssertionError):
        assert_same_step(wrong, truth(), TOLERANCE)


# Traffic


def traffic(options: SplitKVOptions, tp: int, cp: int) -> list[tuple[str, float, torch.dtype]]:
    from megatron.core import parallel_state as state

    from megatron_splitkv.attention.strategies import LAYER_LABELS

    with parallel_state(tp, cp):
        model = build_model(tp, cp, **spec_of(options))
        sample = awkward_samples()[0]
        plan = sample.plan(cp)
        batch = sample.batch(plan, state.get_context_parallel_rank())
        with CommMeter() as meter:
            model(batch, plan)[0].backward()
    records = [r for r in meter.records if r.label in LAYER_LABELS]
    return [(r.label, r.elements, r.dtype) for r in records]


@pytest.mark.parametrize("options", PLACES[::2], ids=lambda o: f"{o.gather}-{o.scatter}")
@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2)])
def test_elements_of_every_place_equal_the_formula(
    options: SplitKVOptions, tp: int, cp: int
) -> None:
    plan = awkward_samples()[0].plan(cp)
    rows = plan.num_blocks * TINY.block_size * (cp - 1) / cp  # Q f
    heads = TINY.num_attention_heads // tp
    query, hidden = heads * TINY.head_dim, TINY.hidden_size
    gathered = {"q": query, "hidden": hidden}[options.gather]
    scattered = {"heads": query, "proj": hidden}[options.scatter]
    expected = {
        options.gather: gathered,
        f"grad_{options.gather}": gathered,
        "out": scattered,
        "grad_out": scattered,
        "lse": heads,
        **(
            {"lse_and_delta": 2 * heads}
            if options.scatter == "heads"
            else {"lse_total": heads, "delta": 2 * heads}
        ),
    }
    for records in on_ranks(4, traffic, options, tp, cp):
        assert len(records) == TINY.num_layers * len(expected)
        for label, elements, _ in records:
            assert elements == pytest.approx(expected[label] * rows, rel=1e-12), label


# Overlap


def order_of_events(options: SplitKVOptions, recompute: bool, cp: int = 2) -> list[tuple[str, str]]:
    """Launches, waits and the context's key/value projection of one layer, in order."""
    from megatron.core import parallel_state as state

    config = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute
        else {}
    )
    with parallel_state(1, cp):
        model = build_model(1, cp, **spec_of(options), **config)
        sample = awkward_samples()[0]
        plan = sample.plan(cp)
        batch = sample.batch(plan, state.get_context_parallel_rank())
        context_rows = len(batch["context_positions"])
        for layer in model.decoder.layers:
            linear = layer.self_attention.linear_kv

            def forward_hook(module: Any, inputs: Any, output: Any) -> None:
                if inputs[0].shape[0] != context_rows:
                    return  # the blocks' own rows
                mark("compute", "context_kv")
                if output[0].requires_grad:
                    # The weight's gradient and the input's are one node: its inputs are ready now.
                    output[0].register_hook(lambda grad: mark("compute", "grad_context_kv"))

            linear.register_forward_hook(forward_hook)
        with CommMeter() as meter:
            model(batch, plan)[0].backward()
    wanted = {"q", "hidden", "grad_q", "grad_hidden", "context_kv", "grad_context_kv"}
    return [event for event in meter.events if event[1] in wanted]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gather", ["q", "hidden"])
@pytest.mark.parametrize("scatter", ["heads", "proj"])
def test_rows_travel_while_context_keys_are_projected(
    gather: str, scatter: str, recompute: bool
) -> None:
    forward = [("launch", gather), ("compute", "context_kv"), ("wait", gather)]
    backward = [
        ("launch", f"grad_{gather}"),
        ("compute", "grad_context_kv"),
        ("wait", f"grad_{gather}"),
    ]
    layers = TINY.num_layers
    # Full recomputation runs a layer's forward again before its backward.
    expected = forward * layers + (forward + backward if recompute else backward) * layers
    options = SplitKVOptions(gather=gather, scatter=scatter, query_cast="all")
    for events in on_ranks(4, order_of_events, options, recompute):
        assert events == expected


def recompute_traffic(
    modules: list[str] | None, options: SplitKVOptions = SplitKVOptions()
) -> tuple[dict[str, int], StepResult]:
    """Calls by label over a step, and the step."""
    config: dict[str, Any] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if modules is None
        else {"recompute_granularity": "selective", "recompute_modules": modules}
    )
    with parallel_state(1, 4):
        ddp = data_parallel(build_model(1, 4, **spec_of(options), **config))
        with CommMeter() as meter:
            step = run_schedule(ddp, awkward_samples()[:1])
    labels = [r.label for r in meter.records]
    return {label: labels.count(label) for label in labels}, step


def test_recomputation_repeats_what_it_must_and_no_more() -> None:
    layers = TINY.num_layers
    full, full_step = on_ranks(4, recompute_traffic, None)[0]
    core, core_step = on_ranks(4, recompute_traffic, ["core_attn"])[0]
    none, plain_step = on_ranks(4, recompute_traffic, [])[0]
    assert (none["q"], none["out"], none["grad_q"]) == (layers, layers, layers)
    # Of core attention nothing but the gather is repeated: backward starts from the saved lse.
    assert (core["q"], core["out"], core["grad_q"]) == (2 * layers, layers, layers)
    assert (full["q"], full["out"], full["grad_q"]) == (2 * layers, 2 * layers, layers)
    for step in (full_step, core_step):
        assert_same_step(step, plain_step, 1e-6)
