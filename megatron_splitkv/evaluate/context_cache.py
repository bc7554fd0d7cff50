"""Keys and values of the context rows of a few texts, each of its own length."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_splitkv.drafter.config import DFlashConfig


class ContextCache:
    """A row a text, a slot a position, in every layer of the drafter.

    Slots from a text's length on are free: a draft step writes its block's keys and values there,
    reads all of them as one view, and leaves them to be overwritten.

    Args:
        config: the drafter.
        max_length: positions of the text, prompt included.
        like: gives dtype and device.

    Shape:
        ``keys`` and ``values`` ``[layers, n, n_kv, slots, hd]``.
    """

    def __init__(self, config: DFlashConfig, max_length: int, like: torch.Tensor) -> None:
        # Room for one more block: among longer ones, a text's last block may be padded. Zeros,
        # because masked slots still enter products, where garbage might be infinite.
        slots = max_length + config.block_size
        shape = (config.num_layers, 1, config.num_key_value_heads, slots, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.lengths = [0]

    @property
    def length(self) -> int:
        """Context rows of the only text."""
        (length,) = self.lengths
        return length

    def append(self, other: "ContextCache") -> None:
        """Take another cache's texts in, behind the own ones."""
        slots = max(self.keys.shape[3], other.keys.shape[3])

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            return F.pad(tensor, (0, 0, 0, slots - tensor.shape[3]))

        self.keys = torch.cat([widened(self.keys), widened(other.keys)], dim=1)
        self.values = torch.cat([widened(self.values), widened(other.values)], dim=1)
        self.lengths += other.lengths

    def select(self, texts: Sequence[int]) -> None:
        """Keep only these texts, in ascending order."""
        if len(texts) < len(self.lengths):
            index = torch.tensor(texts, device=self.keys.device)
            self.keys, self.values = self.keys[:, index], self.values[:, index]
            self.lengths = [self.lengths[text] for text in texts]

    def write(
        self,
        layer: int,
        texts: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store rows of one layer.

        Args:
            layer: of the drafter.
            texts: the text of every row.
            positions: the position of every row in its text.
            key: rotated.
            value: as projected.

        Shape:
            ``texts`` and ``positions`` int64 ``[rows]``; ``key``, ``value`` ``[rows, n_kv, hd]``.
        """
        self.keys[layer, texts, :, positions] = key
        self.values[layer, texts, :, positions] = value
