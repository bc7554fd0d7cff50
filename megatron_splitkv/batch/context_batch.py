"""What one context-parallel rank trains on: its context rows and its draft blocks.

Positions are always those inside the document, computed from global packed positions, so that a
row keeps its rotary phase wherever the plan puts it.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_splitkv.batch.redistribute import redistribute_rows
from megatron_splitkv.batch.teacher_rows import fetch_teacher_rows, read_teacher_rows
from megatron_splitkv.comm import group_rank
from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.packing import Pack
from megatron_splitkv.plan import ContextPlan
from megatron_splitkv.plan.row_source import RowSource


def get_batch_on_this_cp_rank(
    pack: Pack,
    plan: ContextPlan,
    cp_rank: int,
    read_features: Callable[[NDArray[np.int64]], torch.Tensor],
    *,
    mask_token_id: int,
    label_shift: int = 0,
    read_final_hidden: Callable[[NDArray[np.int64]], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """This rank's share of a packed micro-batch; only its own context rows are read.

    Rows from `cu_seqlens[-1]` on belong to no document: they are never read, hold zeros at
    position 0, and no block sees them.

    Args:
        pack: documents, tokens and supervision of the whole micro-batch.
        plan: who holds what; made from anchors of this pack.
        cp_rank: this rank in the context-parallel group.
        read_features: reads the target's features of half-open global row ranges,
            int64[k, 2] -> [rows, C * d].
        mask_token_id: the token of slots 1 to B - 1.
        label_shift: 0 if slot k predicts the token at its own position, 1 if the one behind it.
        read_final_hidden: reads what the target's head read, int64[k, 2] -> [rows, d]; only the
            rows that this rank's trained slots need. None without a teacher.

    Returns:
        CPU tensors, local to the rank, in the order of `plan.rows` and `plan.blocks`:

        - context_features: the target's tapped hidden states.
        - context_positions: positions of the context rows inside their documents.
        - block_tokens: the anchor's token in slot 0, the mask token elsewhere (all slots of a
          padding block).
        - block_positions: positions of the slots inside their document.
        - block_real_tokens: the token at the slot's own position (slot k: token a + k), 0 where the
          document has ended and in padding blocks.
        - block_labels: the token that the slot predicts, at its own position plus `label_shift`; 0
          where the document has ended and in padding blocks.
        - block_label_mask: slots that are trained: of a kept block, with a label inside the
          document that is supervised and not the anchor's token itself.
        - block_keep_mask: False for padding blocks.
        - block_teacher_hidden, with `read_final_hidden`: the target's final hidden state one
          position before the label, of which its head makes the target's own distribution of the
          label; zeros where nothing is trained.

    Shape:
        R rows and n = N / P blocks on this rank: context_features [R, C * d]; context_positions
        int64[R]; block_tokens, block_positions, block_real_tokens, block_labels int64[n * B];
        block_label_mask bool[n * B]; block_keep_mask bool[n]; block_teacher_hidden [n * B, d].

    Raises:
        ConfigError: the plan was not made for this pack, or a reader returns other rows than asked
            for.
    """
    real = _real_ranges(pack, plan, cp_rank)
    num_real = int((real[:, 1] - real[:, 0]).sum())
    features = read_features(real)
    if features.dim() != 2 or features.shape[0] != num_real:
        raise ConfigError(
            f"read_features returned shape {tuple(features.shape)} for {num_real} rows; "
            "it must return [rows, features]"
        )
    batch = _batch(pack, plan, cp_rank, features, mask_token_id, label_shift)
    if read_final_hidden is not None:
        positions = _teacher_positions(pack, plan, cp_rank, label_shift)
        batch["block_teacher_hidden"] = read_teacher_rows(positions, read_final_hidden)
    return batch


def get_online_batch_on_this_cp_rank(
    pack: Pack,
    plan: ContextPlan,
    source: RowSource,
    features: torch.Tensor,
    cp_group: dist.ProcessGroup | None,
    *,
    mask_token_id: int,
    label_shift: int = 0,
    final_hidden: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The same for features that are computed in the job, where each rank holds other rows.

    One all-to-all-v brings them to the plan's owners; gradients flow back to `features` if these
    want any. Rows from `cu_seqlens[-1]` on are zeros here too, whatever `features` hold there.

    Args:
        pack: documents, tokens and supervision of the whole micro-batch, the same on every rank.
        plan: who shall hold what; made from anchors of this pack.
        source: who holds what now, e.g. Megatron's zigzag.
        features: the target's tapped hidden states of this rank's rows, in the source's order.
        cp_group: the ranks; None for one process.
        mask_token_id: the token of slots 1 to B - 1.
        label_shift: 0 if slot k predicts the token at its own position, 1 if the one behind it.
        final_hidden: what the target's head read of the same rows, in the same order; None without
            a teacher. A second all-to-all-v brings the rows that slots need, without gradients.

    Returns:
        What `get_batch_on_this_cp_rank` returns, but context_features and block_teacher_hidden on
        the device that they come from.

    Shape:
        features ``[source.num_rows(rank), C * d]``, or with Megatron's batch dimension
        ``[source.num_rows(rank), 1, C * d]``; final_hidden likewise with d.

    Raises:
        ConfigError: plan, source, pack, group and features do not fit each other.
    """
    cp_rank = group_rank(cp_group)
    if features.dim() == 3 and features.shape[1] == 1:
        features = features.squeeze(1)
    if features.dim() != 2:
        raise ConfigError(
            f"features have shape {tuple(features.shape)}; they must be [rows, features] or "
            "[rows, 1, features]: a micro-batch is one pack (--micro-batch-size 1)"
        )
    real = _real_ranges(pack, plan, cp_rank)
    moved = redistribute_rows(features, plan, source, cp_group, label="context_features")
    features = moved[: int((real[:, 1] - real[:, 0]).sum())]
    batch = _batch(pack, plan, cp_rank, features, mask_token_id, label_shift)
    if final_hidden is not None:
        if final_hidden.dim() == 3 and final_hidden.shape[1] == 1:
            final_hidden = final_hidden.squeeze(1)
        ranks = range(plan.cp_size)
        positions = [_teacher_positions(pack, plan, rank, label_shift) for rank in ranks]
        batch["block_teacher_hidden"] = fetch_teacher_rows(
            positions, source, final_hidden, cp_group
        )
    return batch


def _real_ranges(pack: Pack, plan: ContextPlan, cp_rank: int) -> NDArray[np.int64]:
    """The rank's rows that belong to documents, as global ranges."""
    end = int(pack.cu_seqlens[-1])
    if end > plan.context_length:
        raise ConfigError(
            f"the pack holds {end} tokens, the plan covers {plan.context_length} context rows; "
            "build the plan with the pack's length"
        )
    real = np.minimum(plan.row_ranges(cp_rank), end)
    return real[real[:, 0] < real[:, 1]]


def _batch(
    pack: Pack,
    plan: ContextPlan,
    cp_rank: int,
    features: torch.Tensor,
    mask_token_id: int,
    label_shift: int,
) -> dict[str, torch.Tensor]:
    """The batch from the features of the rank's rows that belong to documents."""
    rows, num_real = plan.rows(cp_rank), features.shape[0]
    document = np.searchsorted(pack.cu_seqlens, rows[:num_real], side="right") - 1
    positions = np.zeros(rows.size, dtype=np.int64)
    positions[:num_real] = rows[:num_real] - pack.cu_seqlens[document]
    if num_real < rows.size:
        # Zeros, not memory as it comes: 0 * NaN would reach the projection's weight gradient.
        features = torch.nn.functional.pad(features, (0, 0, 0, rows.size - num_real))
    return {
        "context_features": features,
        "context_positions": torch.from_numpy(positions),
        **_blocks(pack, plan, cp_rank, mask_token_id, label_shift),
    }


def _blocks(
    pack: Pack, plan: ContextPlan, cp_rank: int, mask_token_id: int, label_shift: int
) -> dict[str, torch.Tensor]:
    blocks = plan.blocks(cp_rank)
    anchors = plan.layout.anchor_positions[blocks, None]
    starts = plan.layout.document_starts[blocks, None]
    keep = plan.layout.block_keep_mask[blocks, None]
    ends = _document_ends(pack, anchors, starts, keep)

    slots = np.arange(plan.layout.block_size)
    positions = anchors + slots
    real_tokens = _tokens(pack, positions, exists=keep & (positions < ends))
    predicted = positions + label_shift
    has_label = keep & (predicted < ends)
    label_mask = _trained(pack, anchors, predicted, has_label)
    tokens = np.where(keep & (slots == 0), real_tokens, mask_token_id)
    return {
        "block_tokens": torch.from_numpy(tokens.ravel()),
        "block_positions": torch.from_numpy((positions - starts).ravel()),
        "block_real_tokens": torch.from_numpy(real_tokens.ravel()),
        "block_labels": torch.from_numpy(_tokens(pack, predicted, exists=has_label).ravel()),
        "block_label_mask": torch.from_numpy(label_mask.ravel()),
        "block_keep_mask": torch.from_numpy(keep.ravel()),
    }


def _trained(
    pack: Pack,
    anchors: NDArray[np.int64],
    predicted: NDArray[np.int64],
    has_label: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Slots whose label is supervised and not the anchor's own token, bool[n, B]."""
    supervised = _take(pack.loss_mask, np.where(has_label, predicted, 0))
    return has_label & (predicted > anchors) & supervised


def _teacher_positions(
    pack: Pack, plan: ContextPlan, cp_rank: int, label_shift: int
) -> NDArray[np.int64]:
    """Packed position before the label of a rank's trained slots, else -1; int64[n * B]."""
    blocks = plan.blocks(cp_rank)
    anchors = plan.layout.anchor_positions[blocks, None]
    starts = plan.layout.document_starts[blocks, None]
    keep = plan.layout.block_keep_mask[blocks, None]
    predicted = anchors + np.arange(plan.layout.block_size) + label_shift
    has_label = keep & (predicted < _document_ends(pack, anchors, starts, keep))
    trained = _trained(pack, anchors, predicted, has_label)
    return np.where(trained, predicted - 1, -1).ravel()


def _tokens(
    pack: Pack, positions: NDArray[np.int64], *, exists: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Tokens at packed positions, 0 where there is none."""
    return np.where(exists, _take(pack.token_ids, np.where(exists, positions, 0)), 0)


def _document_ends(
    pack: Pack,
    anchors: NDArray[np.int64],
    starts: NDArray[np.int64],
    keep: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """End of every kept anchor's document, int64[n, 1]; meaningless for padding blocks."""
    bounds = pack.cu_seqlens
    following = np.searchsorted(bounds, anchors, side="right")
    outside = keep & ((following == bounds.size) | (bounds[following - 1] != starts))
    if outside.any():
        i = int(outside.argmax())
        raise ConfigError(
            f"anchor {anchors[i, 0]} with document start {starts[i, 0]} is in no document of the "
            f"pack (cu_seqlens end at {bounds[-1]}); the plan belongs to another pack"
        )
    return bounds[np.minimum(following, bounds.size - 1)]


def _take[Scalar: np.generic](
    values: NDArray[Scalar], positions: NDArray[np.int64]
) -> NDArray[Scalar]:
    """`values[positions]`; zeros if there are no values at all."""
    return values[positions] if values.size else np.zeros(positions.shape, dtype=values.dtype)
