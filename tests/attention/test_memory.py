"""The memory inventory against the bytes that are really alive, forward and backward, by rank."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_splitkv.attention import merge
from megatron_splitkv.attention.kernels import cpu
from megatron_splitkv.attention.memory import AttentionSizes, attention_memory
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.strategies import SplitKVAttention
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import gloo_pool, subgroup
from megatron_splitkv.testing.live_storages import LiveStorages

B = 16
SIZES = AttentionSizes(
    query_rows=1024,
    context_rows=8192,
    cp_size=4,
    heads=8,
    kv_heads=2,
    head_dim=32,
    hidden_size=192,
    kernel="cpu",
)
FEW_QUERIES = replace(SIZES, query_rows=256, context_rows=16384, heads=16, head_dim=64)


def plan_of(sizes: AttentionSizes, documents: int) -> ContextPlan:
    """Four anchors in the second half of equal documents, with a quarter of the blocks each.

    So few that there are no leaves, which are small and many, and not in the inventory.
    """
    length = sizes.context_rows // documents
    blocks = sizes.query_rows // B // documents
    start = np.repeat(np.arange(documents) * length, blocks)
    anchors = np.tile(np.repeat(length * np.arange(4, 8) // 8, blocks // 4), documents)
    layout = BlockLayout(start + anchors, start, np.ones(start.size, dtype=np.bool_), B)
    strategy = "zigzag" if documents == 1 else "balanced-local"
    return build_plan(layout, sizes.context_rows, sizes.cp_size, strategy=strategy)


def measure(sizes: AttentionSizes, dtype: torch.dtype, documents: int) -> dict[str, Any] | None:
    """One layer's attention on a rank of a pool, gathers and projections as the drafter has them.

    Returns:
        Bytes that were alive at the worst moments and between the passes, and the sizes that only
        the plan knows.
    """
    group = subgroup(range(sizes.cp_size)) if sizes.cp_size > 1 else None
    rank = dist.get_rank() if sizes.cp_size > 1 else 0
    if rank >= sizes.cp_size:
        return None
    plan = plan_of(sizes, documents)
    keys = plan.num_rows(rank)
    attention = SplitKVAttention(
        plan, group, torch.device("cpu"), kernel=cpu, softmax_scale=0.1, options=sizes.options
    )

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    generator = torch.Generator().manual_seed(rank)
    hidden = sizes.options.gather == "hidden"
    project = sizes.options.scatter == "proj"
    heads = (sizes.heads, sizes.head_dim)
    query = draw(sizes.own, sizes.hidden_size) if hidden else draw(sizes.own, *heads)
    key_values = [
        draw(rows, sizes.kv_heads, sizes.head_dim) for rows in (keys, keys, sizes.own, sizes.own)
    ]
    weight_q = draw(sizes.query_width, sizes.hidden_size)
    weight_out = draw(sizes.hidden_size, sizes.query_width)
    grad_out = draw(sizes.own, *((sizes.hidden_size,) if project else heads)).detach()
    inputs = [query, *key_values, weight_q, weight_out, grad_out]

    def attend() -> torch.Tensor:
        if hidden:
            flight = attention.launch(query, label="hidden")
            queries = F.linear(flight.land(), weight_q).unflatten(1, heads)
        else:
            queries = attention.launch(query)
        if not project:
            return attention.attend(queries, *key_values)
        shares = F.linear(attention.attend_partial(queries, *key_values).flatten(1), weight_out)
        return attention.return_rows(shares)

    attend().backward(grad_out)  # plans and tiles are laid out once
    for x in inputs:
        x.grad = None
    with LiveStorages() as storages:
        storages.ignore(*inputs)
        out = attend()
        time.sleep(0.1)  # gloo's thread lets go of what was sent a little after the wait
        found: dict[str, Any] = {"forward": storages.peak, "saved": storages.live}
        found["made_forward"] = storages.made
        storages.restart()
        out.backward(grad_out)
        found["made_backward"] = storages.made
    tiles = [
        (int(rows), int(columns))
        for level in plan.staircase(rank, cpu.LEAF_LIMITS, cast=attention.cast).levels
        for rows, columns in zip(
            (level.q_end - level.q_start) * B, level.k_end - level.k_start, strict=True
        )
    ]
    largest = max(tiles, key=lambda tile: tile[0] * sizes.heads + tile[1] * sizes.kv_heads)
    return found | {
        "backward": storages.peak,
        "attended": attention.exchange.attended_rows,
        "keys": keys,
        "tile_rows": largest[0],
        "tile_keys": largest[1],
        "returned": out.numel() * out.element_size() * project,
    }


def compare(sizes: AttentionSizes, dtype: torch.dtype, documents: int = 1) -> None:
    """Every rank's bytes are within a tenth of the inventory's."""
    sizes = replace(sizes, itemsize=dtype.itemsize)
    args = (sizes, dtype, documents)
    shares = [measure(*args)] if sizes.cp_size == 1 else gloo_pool(4).run(measure, *args)
    for found in shares[: sizes.cp_size]:
        memory = attention_memory(
            replace(
                sizes,
                context_rows=found["keys"] * sizes.cp_size,
                cast_share=found["attended"] / sizes.query_rows,
                tile=(found["tile_rows"], found["tile_keys"]),
            )
        )
        expected = {
            "saved": memory.saved_bytes + found["returned"],
            "forward": memory.forward_peak[1],
            "backward": memory.backward_peak[1],
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, FEW_QUERIES], ids=["many", "few"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_default_places(sizes: AttentionSizes, cp_size: int, dtype: torch.dtype) -> None:
    compare(replace(sizes, cp_size=cp_size), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("gather", "scatter", "save", "fp32_reduce"),
    [
        ("q", "heads", "own", False),
        ("q", "heads", "gathered", True),
        ("hidden", "heads", "gathered", False),
        ("q", "proj", "gathered", False),
        ("hidden", "proj", "gathered", True),
    ],
)
def test_every_place(
    gather: str, scatter: str, save: str, fp32_reduce: bool, dtype: torch.dtype
) -> None:
    options = SplitKVOptions(gather, scatter, "all", save, fp32_reduce)
    compare(replace(SIZES, options=options), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", ["gathered", "own"])
def test_group_cast(save: str, dtype: torch.dtype) -> None:
    options = SplitKVOptions("q", "heads", "group", save)
    compare(replace(SIZES, query_rows=2048, options=options), dtype, documents=4)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_keys_are_neither_copied_nor_repeated(cp_size: int) -> None:
    sizes = replace(FEW_QUERIES, cp_size=cp_size, heads=32, kv_heads=2, head_dim=16)
    args = (sizes, torch.float32, 1)
    shares = [measure(*args)] if cp_size == 1 else gloo_pool(4).run(measure, *args)
    for found in shares[:cp_size]:
        key_bytes = found["keys"] * sizes.key_width * 4
        assert [size for size in found["made_forward"] if size >= key_bytes] == []
        # dk and dv, and what one call gives of them if it is over all keys.
        whole = 4 if found["tile_keys"] == found["keys"] else 2
        assert [s for s in found["made_backward"] if s >= key_bytes] == [key_bytes] * whole


def test_carrier_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    grad_out, delta = torch.randn(1024, 8, 32).bfloat16(), torch.randn(1024, 8)
    monkeypatch.setattr(merge, "PART_ELEMENTS", 1 << 30)
    whole = merge.delta_carrier(grad_out, delta)
    monkeypatch.setattr(merge, "PART_ELEMENTS", 1 << 14)
    with LiveStorages() as storages:
        storages.ignore(grad_out, delta)
        assert torch.equal(merge.delta_carrier(grad_out, delta), whole)
    assert storages.peak < 1.6 * grad_out.nbytes


def test_published_estimate_and_the_shape_of_the_paper() -> None:
    """S = 1M, Q = 32k on 8 ranks, 32 query and 4 key heads of 128, bf16: in units of Q x width."""
    sizes = AttentionSizes(32768, 1 << 20, 8, 32, 4, 128, 2048)
    memory = attention_memory(sizes)
    unit = 32768 * 4096
    assert memory.published == 2 * (33 * unit) // 8 + 2 * unit
    assert memory.saved["queries"] == 2 * unit
    assert memory.saved["output"] == 2 * unit // 8
    grouped = attention_memory(replace(sizes, cast_share=0.25))
    assert grouped.saved["queries"] == memory.saved["queries"] // 4
    assert grouped.backward_peak[1] < memory.backward_peak[1]
    own = attention_memory(replace(sizes, options=replace(sizes.options, save="own")))
    assert memory.saved_bytes - own.saved_bytes == 2 * unit
    assert memory.model_peak(8) - memory.model_peak(7) == memory.saved_bytes


def test_unresolved_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="resolve 'auto' first"):
        replace(SIZES, options=SplitKVOptions())
    with pytest.raises(ConfigError, match="'naive' has no memory model; use cpu, te or flash"):
        replace(SIZES, kernel="naive")
