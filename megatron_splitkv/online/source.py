"""What training asks of a target that runs in the job, and who runs which documents.

A target computes the hidden states of a pack where it likes. It says beforehand, as data, which
rank will hold which rows, and hands them over in that order; one all-to-all-v then brings them to
the plan's owners (`batch.get_online_batch_on_this_cp_rank`). Documents, anchors and plan do not
depend on the target, so they are those of training from a store.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_splitkv.plan.row_source import RowSource
from megatron_splitkv.plan.strategies import assign_lpt


class OnlineTarget(Protocol):
    """A frozen target that gives tapped hidden states of the packs of this rank's group.

    Its weights belong to no optimizer, no gradient bucket and no checkpoint.
    """

    def source(self, cu_seqlens: NDArray[np.int64]) -> RowSource:
        """Who computes which rows of a pack; pure, alike on all ranks, and without a word.

        Args:
            cu_seqlens: offsets of the pack's documents.

        Returns:
            Every row of the pack on one context-parallel rank; ranks may hold none, and padding
            (see `RowSource`).

        Shape:
            cu_seqlens int64[D + 1], ascending from 0 to S.
        """
        ...

    def states(
        self, token_ids: NDArray[np.int64], cu_seqlens: NDArray[np.int64], cp_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target on this rank's part of a pack.

        Every rank of the tensor- and context-parallel groups calls it for every pack, whether or
        not it holds rows: a target may communicate in here.

        Args:
            token_ids: of the whole pack.
            cu_seqlens: offsets of its documents; rows see their own document alone.
            cp_rank: this rank in the context-parallel group.

        Returns:
            ``(features, final_hidden)`` of the rows of ``source(cu_seqlens)`` on this rank, in its
            order, without gradients, on the device of training. Features are the outputs of the
            tapped layers side by side, final_hidden what the target's head reads; None where
            nobody asked for it. Rows of padding may hold anything.

        Shape:
            token_ids int64[S]; cu_seqlens int64[D + 1]; features ``[rows, C * d]``; final_hidden
            ``[rows, d]``, with rows = ``source(cu_seqlens).num_rows(cp_rank)``, possibly 0.
        """
        ...


def document_owners(
    cu_seqlens: NDArray[np.int64], cp_size: int, linear_length: int
) -> NDArray[np.int64]:
    """Whole documents to ranks, so that the costliest rank costs little: LPT by estimated cost.

    A document of n tokens costs n (n + k): causal attention, and layers that are linear in n. Ties
    go to the lower index, so all ranks come to the same owners.

    Args:
        cu_seqlens: offsets of the documents.
        cp_size: P.
        linear_length: k, the length at which a document's attention costs as much as its linear
            layers; 0 counts attention alone.

    Returns:
        The rank of every document; with fewer documents than ranks, some have none.

    Shape:
        cu_seqlens int64[D + 1] -> int64[D], in [0, P).
    """
    lengths = np.diff(cu_seqlens)
    return assign_lpt(lengths * (lengths + linear_length), cp_size, lengths.size)


def documents_source(
    cu_seqlens: NDArray[np.int64], owners: NDArray[np.int64], cp_size: int
) -> RowSource:
    """Rows of a pack whose documents lie whole on ranks, in the pack's order on each.

    Args:
        cu_seqlens: offsets of the documents.
        owners: of `document_owners`.
        cp_size: P.

    Shape:
        cu_seqlens int64[D + 1], owners int64[D].
    """
    by_rank = np.argsort(owners, kind="stable")
    return RowSource(cu_seqlens[:-1][by_rank], cu_seqlens[1:][by_rank], owners[by_rank], cp_size)
