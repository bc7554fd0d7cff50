"""The memory inventory against the bytes that are really alive, forward and backward, by rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_splitkv.attention.kernels import cpu
from megatron_splitkv.attention.memory import AttentionSizes, attention_memory
from megatron_splitkv.attention.options import SplitKVOptions
from megatron_splitkv.attention.strategies import SplitKVAttention
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.anchors import BlockLayout
from megatron_splitkv.plan import ContextPlan, build_plan
from megatron_splitkv.testing import gloo_pool, subgroup
from tests.attention.live_storages import LiveStorages

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
FEW_QUERIES = replace(SIZES, query_rows=256, context_rows=16384)


def plan_of(sizes: AttentionSizes, documents: int) -> ContextPlan:
    """Blocks spread over the second half of equal documents."""
    length = sizes.context_rows // documents
    blocks = sizes.query_rows // B // documents
    start = np.repeat(np.arange(documents) * length, blocks)
    anchors = np.tile(np.linspace(length // 2, length - 1, blocks).astype(np.int64), documents)
    layout = BlockLayout(start + anchors, start, np.ones(start.size, dtype=np.bool_), B)
    strategy = "zigzag" if documents == 1 else "balanced-local"
    return build_plan(layout, sizes.context_rows, sizes.cp_size, strategy=strategy)


def measure(sizes: AttentionSizes, dtype: torch.dtype, documents: int) -> dict[str, int] | None:
    """One layer's attention on a rank of a pool, gathers and projections as the drafter has them.

    Returns:
        Bytes that were alive at the worst moments and between the passes, the largest storages,
        and the sizes that only the plan knows.
    """
    group = subgroup(range(sizes.cp_size)) if sizes.cp_size > 1 else None
    rank = dist.get_rank() if sizes.cp_size > 1 else 0
    if rank >= sizes.cp_size:
        return None
    plan = plan_of(sizes, documents)
    keys = plan.num_rows(rank)
    attention = SplitKVAttention(
        plan, group, torch.device("cpu"), kernel="cpu", softmax_scale=0.1, options=sizes.options
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
        found = {"forward": storages.peak, "saved": storages.live, "new": storages.largest}
        storages.restart()
        out.backward(grad_out)
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
            "forward": memory.forward_peak,
            "backward": memory.backward_peak,
        }
        print(found, expected)
        assert found["saved"] == pytest.approx(expected["saved"], rel=0.1)
        assert found["forward"] == pytest.approx(memory.forward_peak[1], rel=0.1)
        assert found["backward"] == pytest.approx(memory.backward_peak[1], rel=0.1)


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
