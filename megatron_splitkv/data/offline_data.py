"""Hidden states that another trainer prepared, seen alike whatever files they lie in.

A folder of such data is samples in a fixed order, one or two files each. A sample's tokens are
read when it is opened; its hidden states stay on disk and are read by row ranges.

Shape legend: n tokens of a sample, C tapped layers, d hidden size.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_splitkv.config import ConfigError

# Of a row range of one sample: the tapped layers side by side, and the final hidden states.
RowReader = Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class OfflineSample:
    """One sample: its tokens in memory, its hidden states on disk.

    Args:
        path: the file with the hidden states, for messages.
        token_ids: ids that the target read.
        loss_mask: True where a token is supervised.
        feature_width: C * d, numbers of tapped states in a row.
        final_width: d where the sample has final hidden states, else 0.
        dtype: of the hidden states on disk.
        read: rows ``start..stop`` as ``(features [r, C * d], final hidden [r, d] or None)``. They
            may be views of a mapped file; only pages of these rows are touched.

    Shape:
        token_ids int64[n]. loss_mask bool[n].

    Raises:
        ConfigError: hidden states that are not floating-point numbers, or no token at all.
    """

    path: Path
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    feature_width: int
    final_width: int
    dtype: torch.dtype
    read: RowReader

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"{self.path} holds hidden states of dtype {self.dtype}; float32, bfloat16 and "
                "float16 are read"
            )
        if not self.token_ids.numel():
            raise ConfigError(f"{self.path} holds no token; remove the file")

    @property
    def num_tokens(self) -> int:
        """n."""
        return self.token_ids.numel()


class OfflineData(Protocol):
    """Samples of one folder, in a fixed order.

    Attributes:
        folder: where they lie.
        trainer: whose layout it is, for messages.
        layer_id_offset: what the trainer adds to a 0-based layer output when it names it.
    """

    folder: Path
    trainer: str
    layer_id_offset: int

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def files(self) -> Sequence[Path]:
        """All files that are read, in a fixed order."""
        ...

    def open(self, number: int) -> OfflineSample:
        """Open one sample; its files close with the last reference to it.

        Raises:
            ConfigError: a file that is not of the trainer's layout, named.
        """
        ...


def natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """Sort key that counts: ``data_2`` comes before ``data_10``, folder by folder."""
    parts = re.split(r"(\d+)", path.as_posix())
    # Text and digits alternate, so a number is only ever compared with a number.
    return tuple((int(p), "") if i % 2 else (0, p) for i, p in enumerate(parts))


def row_vector(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """One number a token, ``[n]`` or ``[1, n]`` on disk.

    Returns:
        A view, ``[n]``.

    Raises:
        ConfigError: another shape.
    """
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise ConfigError(f"{path}: {name} has shape {list(tensor.shape)}, expected [S] or [1, S]")
    return tensor


def row_matrix(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A row of numbers a token, ``[n, w]`` or ``[1, n, w]`` on disk.

    Returns:
        A view, ``[n, w]``.

    Raises:
        ConfigError: another shape.
    """
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2:
        raise ConfigError(
            f"{path}: {name} has shape {list(tensor.shape)}, expected [S, width] or [1, S, width]"
        )
    return tensor


def check_lengths(path: Path, lengths: dict[str, int]) -> None:
    """Refuse a sample whose parts have different numbers of tokens.

    Raises:
        ConfigError: naming the file and each part's length.
    """
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"{path}: its parts differ in length: {found}; prepare it again")
