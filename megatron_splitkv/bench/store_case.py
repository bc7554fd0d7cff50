"""A corpus of very unequal documents with made-up features that anybody can recompute."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.packing import Pack, PackedEpochs, draw_blocks, read_pack
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import StoreBuilder
from megatron_splitkv.plan import ContextPlan, build_plan, fitting_chunks

BLOCK_SIZE = 16
_SPREAD = 1.75  # of the lengths' logarithms: many short documents, a few at the limit
_MEDIAN_SHARE = 1 / 256  # of the longest length
_VOCAB = 1024
PIECE_ROWS = 4096
# Odd numbers without a pattern, for mixing row and column numbers.
_ROW_MIX, _DOCUMENT_MIX, _COLUMN_MIX = (np.uint32(n) for n in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))


@dataclass(frozen=True)
class StoreShape:
    """What is stored and read.

    Args:
        documents: how many; their lengths are log-normal around `max_length` / 256.
        max_length: tokens of the longest, and of a pack.
        width: numbers in a row of features, bfloat16.
        cp_size: P, ranks that share a pack.
        num_anchors: draft blocks a document.
        seed: of lengths, tokens and anchors.

    Raises:
        ConfigError: a number below 1, or lengths that leave nothing to draft.
    """

    documents: int = 1000
    max_length: int = 1 << 18
    width: int = 256
    cp_size: int = 8
    num_anchors: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("documents", 1),
            ("max_length", 16),
            ("width", 1),
            ("cp_size", 1),
            ("num_anchors", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least {least}")

    @property
    def meta(self) -> StoreMeta:
        """Of a pretended target with one tapped layer."""
        target = TargetInfo("synthetic", f"seed {self.seed}", 1, self.width, _VOCAB, _VOCAB - 1)
        return StoreMeta(target, (0,), "bfloat16")

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document; the longest is stretched to `max_length`."""
        generator = np.random.default_rng(self.seed)
        drawn = generator.lognormal(
            np.log(self.max_length * _MEDIAN_SHARE), _SPREAD, self.documents
        )
        lengths = np.clip(drawn, 2, self.max_length).astype(np.int64)
        lengths[lengths.argmax()] = self.max_length
        return lengths


def feature_bits(document: int, start: int, stop: int, width: int) -> NDArray[np.uint16]:
    """Bits of the bfloat16 features of some rows: a function of document, row and column.

    Shape:
        ``[stop - start, width]``. Every value is finite.
    """
    rows = np.arange(start, stop, dtype=np.uint32) * _ROW_MIX
    rows ^= np.array([document], dtype=np.uint32) * _DOCUMENT_MIX
    columns = np.arange(1, width + 1, dtype=np.uint32) * _COLUMN_MIX
    mixed = (rows[:, None] ^ columns) * _ROW_MIX
    # The top bit of the exponent is cleared: neither infinite nor NaN.
    return ((mixed >> np.uint32(16)) & np.uint32(0xBFFF)).astype(np.uint16)


def build_store(folder: Path, shape: StoreShape, progress: Callable[[int, int], None]) -> int:
    """Write the store, shard by shard and piece by piece.

    Args:
        folder: to create.
        shape: what to store.
        progress: called with shards written and shards in all.

    Returns:
        The number of shards.
    """
    builder = StoreBuilder(folder, shape.meta, shape.lengths())
    progress(0, builder.num_shards)
    for shard in range(builder.num_shards):
        first, last = builder.bounds[shard : shard + 2].tolist()
        lengths = builder.lengths[first:last].tolist()
        ids = [_token_ids(first + i, n, shape.seed) for i, n in enumerate(lengths)]
        masks = [torch.arange(n) >= n // 4 for n in lengths]
        with builder.open_shard(shard, ids, masks) as writer:
            for i, length in enumerate(lengths):
                for start in range(0, length, PIECE_ROWS):
                    stop = min(length, start + PIECE_ROWS)
                    bits = feature_bits(first + i, start, stop, shape.width)
                    writer.write_rows(i, start, torch.from_numpy(bits).view(torch.bfloat16))
        progress(shard + 1, builder.num_shards)
    builder.close()
    return builder.num_shards


def _token_ids(document: int, length: int, seed: int) -> torch.Tensor:
    words = np.random.Philox(np.random.SeedSequence([seed, document])).random_raw(length)
    return torch.from_numpy((words % (_VOCAB - 1)).astype(np.int32))


def planned_packs(store: FeatureStore, shape: StoreShape) -> Iterator[tuple[Pack, ContextPlan]]:
    """One epoch of packs with their plans, as every rank of the group makes them."""
    packing = PackedEpochs(store.lengths, shape.max_length, shape.seed)
    for item in range(packing.num_packs(0)):
        yield plan_pack(store, shape, packing, item)


def plan_pack(
    store: FeatureStore, shape: StoreShape, packing: PackedEpochs, item: int
) -> tuple[Pack, ContextPlan]:
    """One pack and its plan.

    Args:
        store: where the documents lie.
        shape: of the case.
        packing: of the store's lengths.
        item: which pack.
    """
    pack = read_pack(store, packing.pack_documents(item))
    layout = draw_blocks(
        pack,
        num_anchors=shape.num_anchors,
        block_size=BLOCK_SIZE,
        seed=shape.seed,
        item_index=item,
    )
    rows = int(pack.cu_seqlens[-1])
    chunks = fitting_chunks(None, rows, shape.cp_size)
    return pack, build_plan(layout, rows, shape.cp_size, chunks_per_rank=chunks)
