"""What preparation takes from text before any hidden state: samples, and prompts held out."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """One tokenised document before it has features.

    Shape:
        token_ids: int64 ``[n]``. loss_mask: bool ``[n]``, True on supervised tokens.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt for evaluation."""

    id: str
    text: str
    token_ids: list[int]


def supervised(token_ids: torch.Tensor, first: int) -> Sample:
    """A sample whose tokens from position `first` on carry loss."""
    return Sample(token_ids, torch.arange(token_ids.numel()) >= first)
