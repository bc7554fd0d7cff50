"""Trained matrices with a row for every token, split over TP without padding the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megatron_splitkv.comm import group_rank, group_size


def vocabulary_rows(vocab_size: int, tp_group: dist.ProcessGroup | None) -> slice:
    """Tokens whose rows this TP rank holds: ``[r V // T, (r + 1) V // T)`` on rank r.

    Args:
        vocab_size: V.
        tp_group: ranks that share the vocabulary.
    """
    rank, size = group_rank(tp_group), group_size(tp_group)
    return slice(rank * vocab_size // size, (rank + 1) * vocab_size // size)


class VocabularyMatrix(torch.nn.Module):
    """This TP rank's rows of a trained matrix, the same rows as of the target's head.

    Its gradient is complete on its rank but for the sum over data and context parallelism. A
    checkpoint holds the whole matrix, whatever the sizes of its shards. Where these differ, so do
    the lengths of the ranks' gradient buffers, and a ring may sum a replicated parameter's gradient
    in another order on each, one rounding apart. Published vocabularies divide evenly.

    Args:
        vocab_size: V.
        width: numbers in a row.
        dtype: of the parameter.
        tp_group: ranks that share the vocabulary.

    Shape:
        ``weight [V_p, width]``, not filled: see `initialize_weights`.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        rows = vocabulary_rows(vocab_size, tp_group)
        self.tp_group = tp_group
        self.vocab_size, self.vocab_start = vocab_size, rows.start
        self.weight = torch.nn.Parameter(torch.empty(rows.stop - rows.start, width, dtype=dtype))
        # What Megatron's optimizer and `initialize_weights` know a split parameter by.
        for name, value in (
            ("tensor_model_parallel", True),
            ("partition_dim", 0),
            ("partition_stride", 1),
            ("vocab_size", vocab_size),
        ):
            setattr(self.weight, name, value)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """The shard and its place in the whole matrix, for `megatron.core.dist_checkpointing`."""
        assert not sharded_offsets, "a drafter's heads lie in no stack of layers"
        replica = group_rank(ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        key = f"{prefix}weight"
        return {
            key: ShardedTensor(
                key,
                self.weight,
                self.weight.dtype,
                local_shape=tuple(self.weight.shape),
                global_shape=(self.vocab_size, self.weight.shape[1]),
                global_offset=(self.vocab_start, 0),
                axis_fragmentations=None,  # no regular grid: shards may differ by a row
                replica_id=(0, 0, replica),
            )
        }
