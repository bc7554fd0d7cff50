"""The target's embedding and output head: read, never trained, never saved with the drafter."""

import torch
import torch.distributed as dist

from megatron_splitkv.comm import all_reduce_sum
from megatron_splitkv.drafter.vocabulary_matrix import vocabulary_rows


class FrozenVocabulary(torch.nn.Module):
    """This TP rank's rows of the target's embedding and head, as non-persistent buffers.

    Both are split over TP by vocabulary, ``[r * V // T, (r + 1) * V // T)`` on rank r: shards may
    differ by a row, so the vocabulary is never padded. Per rank that is ``2 V d / T`` numbers, or
    half of it if the target ties them.

    Args:
        embedding_weight: the target's whole embedding; only this rank's rows are copied.
        head_weight: the target's whole head, None if it is the embedding.
        mask_token_id: token of all slots but the first.
        dtype: dtype of the copies.
        tp_group: ranks that share the vocabulary.

    Shape:
        ``embedding_weight``, ``head_weight`` ``[V, d]``.
    """

    embedding_weight: torch.Tensor
    untied_head_weight: torch.Tensor | None

    def __init__(
        self,
        embedding_weight: torch.Tensor,
        head_weight: torch.Tensor | None,
        *,
        mask_token_id: int,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.mask_token_id = mask_token_id
        vocab_size = embedding_weight.shape[0]
        local = vocabulary_rows(vocab_size, tp_group)
        self.vocab_start = local.start
        self._register("embedding_weight", embedding_weight[local], dtype)
        self._register(
            "untied_head_weight", None if head_weight is None else head_weight[local], dtype
        )

    def _register(self, name: str, shard: torch.Tensor | None, dtype: torch.dtype) -> None:
        copy = None if shard is None else shard.detach().to(dtype, copy=True)
        self.register_buffer(name, copy, persistent=False)

    @property
    def head_weight(self) -> torch.Tensor:
        """This rank's rows of the head, ``[V_p, d]``."""
        head = self.untied_head_weight
        return self.embedding_weight if head is None else head

    def embed_blocks(self, block_tokens: torch.Tensor, block_size: int) -> torch.Tensor:
        """Embed draft rows: the anchor's token in slot 0, the mask token in all others.

        Only the anchors and one mask row are looked up and, under TP, summed over ranks.

        Args:
            block_tokens: tokens of all slots.
            block_size: B, slots of a block.

        Shape:
            ``block_tokens`` int64 ``[N * B]``; the result ``[N * B, d]``.
        """
        anchors = block_tokens.view(-1, block_size)[:, 0]
        rows = self.embed(torch.cat([anchors, anchors.new_full((1,), self.mask_token_id)]))
        blocks = rows[-1].expand(anchors.shape[0], block_size, -1).clone()
        blocks[:, 0] = rows[:-1]
        return blocks.flatten(0, 1)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look tokens up, and under TP sum the rows over ranks.

        Shape:
            ``tokens`` int64 ``[rows]``, equal on all TP ranks; the result ``[rows, d]``.
        """
        local = tokens - self.vocab_start
        is_local = (local >= 0) & (local < self.embedding_weight.shape[0])
        rows = self.embedding_weight[torch.where(is_local, local, 0)] * is_local[:, None]
        return all_reduce_sum(rows, self.tp_group, label="embedding")
