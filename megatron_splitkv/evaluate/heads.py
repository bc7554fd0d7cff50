"""From the drafter's hidden states to proposed tokens: what the kinds of drafter do differently.

All kinds share the backbone (`DraftModel`). DFlash reads each slot's token off by itself, so that
one product with the target's head is the whole proposal; Domino and DSpark go through the slots in
order, because a slot's choice depends on the ones before it.

Shape legend: n texts, b slots of the block, V vocabulary, d hidden size.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.loss.vocabulary import soft_capped

_INITIAL_STD = 0.02


class ProposalHead(Protocol):
    """Chooses greedily what a drafter proposes."""

    def propose(
        self,
        hidden: torch.Tensor,
        anchor_tokens: torch.Tensor,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        """Propose the tokens that follow each anchor.

        Args:
            hidden: the backbone's output for the slots of each text's block, slot 0 the anchor's.
                Blocks are shorter than ``block_size`` where a text is about to end; slots behind a
                text's own short block hold anything finite, and so may their proposals.
            anchor_tokens: the real token in slot 0.
            embedding: the target's input embedding, unscaled.
            head: the target's output head.

        Returns:
            Proposals; the first one follows the anchor, whatever the kind's ``label_shift``.

        Shape:
            ``hidden [n, b, d]``, ``anchor_tokens int64[n]``, ``embedding`` and ``head [V, d]``;
            result ``int64[n, b - 1 + label_shift]``.
        """


class DFlashHead:
    """DFlash's: the target's best token of every slot but the anchor's.

    Args:
        config: the drafter.
    """

    def __init__(self, config: DFlashConfig) -> None:
        self._config = config

    def propose(
        self,
        hidden: torch.Tensor,
        anchor_tokens: torch.Tensor,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        drafted = hidden[:, self._config.first_trained_slot :]
        return vocabulary_logits(self._config, drafted, head).argmax(dim=-1)


def vocabulary_logits(
    config: DFlashConfig, hidden: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """Logits by the target's head, in its dtype, soft-capped where the drafter is.

    Args:
        config: the drafter.
        hidden: final hidden states.
        head: the target's output head.

    Shape:
        ``hidden [..., d]``, ``head [V, d]``; result ``[..., V]``.

    Source: z-lab/dflash, `dflash/model.py`, `DFlashDraftModel.compute_logits`.
    """
    return soft_capped(F.linear(hidden.to(head.dtype), head), config.final_logit_softcapping)


def proposal_head(config: DFlashConfig, tensors: Mapping[str, torch.Tensor]) -> ProposalHead:
    """Return the head of a drafter's kind.

    Args:
        config: the drafter.
        tensors: by their public names, the dtype and device of the backbone; those of the
            backbone may be among them.

    Raises:
        ConfigError: a tensor of the head is missing or of another shape.
    """
    shapes = config.head_shapes()
    for name, shape in shapes.items():
        if name not in tensors:
            raise ConfigError(f"the {config.kind} drafter has no tensor {name}; export it again")
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"tensor {name} of the {config.kind} drafter is {tuple(tensors[name].shape)}, its "
                f"configuration says {shape}"
            )
    own = {name: tensors[name] for name in shapes}
    # Imported where they are used: both build on `vocabulary_logits`.
    if isinstance(config, DominoConfig):
        from megatron_splitkv.evaluate.domino_head import DominoHead

        return DominoHead(config, own)
    if isinstance(config, DSparkConfig):
        from megatron_splitkv.evaluate.dspark_head import DSparkHead

        return DSparkHead(config, own)
    return DFlashHead(config)


def untrained_head(
    config: DFlashConfig, generator: torch.Generator, like: torch.Tensor
) -> ProposalHead:
    """Return a head with fresh weights: what training starts from, for a control.

    Args:
        config: the drafter.
        generator: of the matrices, on the CPU; vectors are zero.
        like: gives dtype and device.
    """
    tensors = {
        name: torch.randn(shape, generator=generator) * _INITIAL_STD
        if len(shape) > 1
        else torch.zeros(shape)
        for name, shape in config.head_shapes().items()
    }
    return proposal_head(config, {name: tensor.to(like) for name, tensor in tensors.items()})
