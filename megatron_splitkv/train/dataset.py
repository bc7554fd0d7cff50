"""Packed micro-batches as a map-style dataset: one item is one rank's share of one pack.

Everything about an item follows from its index: its documents, its anchors, its plan. So Megatron's
sampler, its loader workers and its resume work as they are, ranks of a TP x CP group agree without
a word, and no rank reads context rows of another.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_splitkv.batch import get_batch_on_this_cp_rank
from megatron_splitkv.data.dealing import Dealing
from megatron_splitkv.data.packing import (
    Pack,
    PackedEpochs,
    draw_blocks,
    feature_reader,
    final_hidden_reader,
    read_pack,
)
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.plan import build_plan, fitting_chunks
from megatron_splitkv.plan.cost import PlanCost

PLAN_PREFIX = "plan."
PACK_PREFIX = "pack."


@dataclass(frozen=True)
class BlockRecipe:
    """How draft blocks are drawn in a pack and where its context goes.

    Args:
        num_anchors: blocks per document.
        block_size: B.
        mask_token_id: token of slots 1 to B - 1.
        plan_strategy: see `build_plan`.
        chunks_per_rank: see `build_plan`; fewer in packs that are too short for as many.
        seed: key of the draw, with the item's index and the documents' ids.
        plan_cost: what plan strategy ``auto`` weighs.
        label_shift: see `DFlashConfig.label_shift`.
        windows: of the layers, whose work the plan balances.
        block_order: who owns which blocks, see `build_plan`; the layers' strategies decide, see
            `attention.choice.block_order_of`.
        final_hidden: read what the target's head read, too; see `DFlashConfig.needs_final_hidden`.
    """

    num_anchors: int
    block_size: int
    mask_token_id: int
    plan_strategy: str
    chunks_per_rank: int | None
    seed: int
    plan_cost: PlanCost | None = None
    label_shift: int = 0
    windows: tuple[int | None, ...] = (None,)
    block_order: str = "contiguous"
    final_hidden: bool = False


class PackDataset(Dataset[dict[str, torch.Tensor]]):
    """Packs of a feature store as one context-parallel rank sees them.

    Args:
        store: where the documents lie.
        packing: which documents an item holds.
        recipe: how its blocks are drawn.
        num_items: length that the sampler sees.
        cp_rank: this rank in its context-parallel group.
        cp_size: ranks of that group.
        dealing: which item takes an index's place, so that data-parallel replicas have equally
            much to do; None for the index's own.
        period: items repeat after so many: an evaluation that takes this many sees the same packs
            and the same anchors every time. None for training.
        online: a target in the job computes the features: an item is the pack itself, alike on all
            ranks, and its plan.
    """

    def __init__(
        self,
        store: FeatureStore,
        packing: PackedEpochs,
        recipe: BlockRecipe,
        *,
        num_items: int,
        cp_rank: int,
        cp_size: int,
        dealing: Dealing | None = None,
        period: int | None = None,
        online: bool = False,
    ) -> None:
        self.store = store
        self.packing = packing
        self.recipe = recipe
        self.num_items = num_items
        self.cp_rank = cp_rank
        self.cp_size = cp_size
        self.dealing = dealing
        self.period = period
        self.online = online

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """The rank's batch, and the plan's arrays under names that start with `PLAN_PREFIX`.

        Online it is the pack's arrays, under names that start with `PACK_PREFIX`, and the plan's.
        """
        item = index if self.dealing is None else self.dealing.item(index)
        if self.period is not None:
            item %= self.period
        recipe = self.recipe
        pack = read_pack(self.store, self.packing.pack_documents(item))
        layout = draw_blocks(
            pack,
            num_anchors=recipe.num_anchors,
            block_size=recipe.block_size,
            seed=recipe.seed,
            item_index=item,
        )
        context_length = int(pack.cu_seqlens[-1])
        plan = build_plan(
            layout,
            context_length,
            self.cp_size,
            strategy=recipe.plan_strategy,
            chunks_per_rank=fitting_chunks(recipe.chunks_per_rank, context_length, self.cp_size),
            cost=recipe.plan_cost,
            windows=recipe.windows,
            block_order=recipe.block_order,
        )
        plan_arrays = _tensors(PLAN_PREFIX, plan.to_arrays())
        if self.online:
            return _tensors(PACK_PREFIX, vars(pack)) | plan_arrays
        batch = get_batch_on_this_cp_rank(
            pack,
            plan,
            self.cp_rank,
            feature_reader(self.store, pack),
            mask_token_id=recipe.mask_token_id,
            label_shift=recipe.label_shift,
            read_final_hidden=(
                final_hidden_reader(self.store, pack) if recipe.final_hidden else None
            ),
        )
        return batch | plan_arrays


def _tensors(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {prefix + name: torch.from_numpy(array) for name, array in arrays.items()}


def split_batch(
    collated: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor] | Pack, dict[str, Any]]:
    """Undo the collation of one item.

    Args:
        collated: what a loader with micro-batch size 1 yields.

    Returns:
        The batch without its leading dimension, or the pack where a target in the job computes the
        features; and the arrays of its plan, see `ContextPlan.from_arrays`.
    """
    plan_arrays, pack_arrays, batch = {}, {}, {}
    for name, tensor in collated.items():
        if name.startswith(PLAN_PREFIX):
            plan_arrays[name.removeprefix(PLAN_PREFIX)] = tensor[0].numpy()
        elif name.startswith(PACK_PREFIX):
            pack_arrays[name.removeprefix(PACK_PREFIX)] = tensor[0].numpy()
        else:
            batch[name] = tensor[0]
    return Pack(**pack_arrays) if pack_arrays else batch, plan_arrays
