"""The Domino drafter: DFlash's backbone, and a head that reads the tokens before a slot's label.

The backbone drafts all slots at once, blind to what the other slots choose. A GRU over the tokens
from the anchor on knows them; of its state and the backbone's output a small projection makes a
correction of the slot's logits. In training the tokens are the real ones, all blocks run at once;
a draft step goes through the slots in order (`evaluate.domino_head`).

What slot k of a block with anchor a does, p = ``pure_draft_prefix_len``:

=============  =====================  ==========================  ================
`shift_label`  predicts the token at  GRU has read the tokens at  corrected slots
=============  =====================  ==========================  ================
true           a + k + 1              a .. a + k                  k >= p
false          a + k (slot 0 none)    a .. a + k - 1              k >= p + 1
=============  =====================  ==========================  ================

So the GRU has always read everything up to the label, and nothing of it, and the first p proposals
are the backbone's alone. Neither the GRU nor the projections have biases; the projection reads the
backbone's output first, then the GRU's state. The GRU reads the target's embeddings as the target's
own layers do, with its `input_embedding_scale`.

Source: sgl-project/SpecForge, `specforge/modeling/draft/domino.py` (modules, slots, states, and
`_sample_draft_tokens`) and `specforge/core/dflash.py` (`OnlineDominoModel`: labels, weights,
losses); sgl-project/sglang, `python/sglang/srt/speculative/domino_utils.py`: its
`domino_greedy_rollout` serves the same with p = 1. With shifted labels SpecForge's and SGLang's
clients propose B - 1 tokens, the last slot unused; vllm-project/speculators proposes all B, as is
done here.

Shape legend: N blocks of B slots of this CP rank, Q = N * B draft rows, d hidden size, g width of
the GRU, e width of the correction, V_p tokens of this TP rank.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.model import DFlashModel
from megatron_splitkv.drafter.vocabulary_matrix import VocabularyMatrix
from megatron_splitkv.loss import drafter_report
from megatron_splitkv.loss.domino import base_loss_weight, chunked_domino_loss


class DominoModel(DFlashModel):
    """A Domino drafter; arguments as of `DFlashModel`, `dflash` is a `DominoConfig`.

    The GRU and the first projection are small and the same on every TP rank, as are their rows and
    so their gradients; the correction's rows are split by vocabulary like the target's head.
    """

    dflash: DominoConfig

    def build_heads(self) -> None:
        """Make the GRU and the projections."""
        domino, dtype = self.dflash, self.config.params_dtype
        self.prefix_gru = torch.nn.GRU(
            domino.hidden_size, domino.gru_hidden_dim, bias=False, batch_first=True, dtype=dtype
        )
        self.embed_proj = _Projections(self.config, domino, self.tp_group)

    def loss(
        self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Price the drafts by both losses, mixed by how much of the training is done.

        Returns:
            numerator: ``(1 - lambda) final + lambda base``.
            predictions: of the corrected logits.
            report: ``final loss``, ``base loss``, ``base loss weight`` (lambda) and
                ``base_accept_len``, what the backbone alone would reach.
        """
        domino = self.dflash
        hidden = hidden.masked_fill((weights == 0)[:, None], 0.0)  # whatever they hold
        base_weight = base_loss_weight(self.training_progress, domino.base_loss_decay_ratio)
        found = chunked_domino_loss(
            hidden,
            self.correction_features(hidden, batch["block_real_tokens"]),
            self.vocabulary.head_weight,
            self.embed_proj.vocabulary_weight,
            batch["block_labels"],
            weights,
            base_weight,
            softcap=domino.final_logit_softcapping,
            tp_group=self.tp_group,
            vocab_start=self.vocabulary.vocab_start,
        )
        of_backbone = drafter_report(
            found.base_predictions,
            batch["block_labels"],
            batch["block_label_mask"],
            batch["block_keep_mask"],
            domino.block_size,
            domino.first_trained_slot,
        )
        total = weights.sum()
        report = {
            "final loss": torch.stack([found.final, total]),
            "base loss": torch.stack([found.base, total]),
            "base loss weight": torch.stack([total.new_full((), base_weight), total.new_ones(())]),
            "base_accept_len": of_backbone["accept_len"],
        }
        return found.numerator, found.predictions, report

    def correction_features(self, hidden: torch.Tensor, real_tokens: torch.Tensor) -> torch.Tensor:
        """Return what the correction of every slot's logits is projected from.

        Args:
            hidden: of `draft`.
            real_tokens: the token at each slot's own position.

        Returns:
            Zeros for the slots that are the backbone's alone.

        Shape:
            ``hidden [Q, d]``, ``real_tokens`` int64 ``[Q]``; the result ``[Q, e]``.
        """
        domino = self.dflash
        # A slot behind a token that no slot predicts from has nothing to read it for.
        read = slice(0, domino.num_proposals)
        tokens = real_tokens.view(-1, domino.block_size)[:, read]
        embedded = self.vocabulary.embed(tokens.flatten()).view(*tokens.shape, -1)
        if domino.input_embedding_scale != 1.0:
            embedded = embedded * domino.input_embedding_scale
        states, _ = self.prefix_gru(embedded)  # [N, proposals, g]
        alone = domino.pure_draft_prefix_len
        first = domino.first_trained_slot + alone
        slots = hidden.view(-1, domino.block_size, domino.hidden_size)
        features = self.embed_proj(torch.cat([slots[:, first:], states[:, alone:]], dim=-1))
        return F.pad(features, (0, 0, first, 0)).flatten(0, 1)


class _Projections(MegatronModule):
    """From hidden state and GRU state to the correction's features; holds its vocabulary's rows.

    Its children have the names that they have in public checkpoints, where this is an
    `nn.Sequential` with an activation at index 1.
    """

    def __init__(
        self, config: TransformerConfig, domino: DominoConfig, tp_group: dist.ProcessGroup
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        dtype, width = config.params_dtype, domino.hidden_size + domino.gru_hidden_dim
        self.add_module("0", torch.nn.Linear(width, domino.emb_dim, bias=False, dtype=dtype))
        self.add_module(
            "2", VocabularyMatrix(domino.vocab_size, domino.emb_dim, dtype=dtype, tp_group=tp_group)
        )

    @property
    def vocabulary_weight(self) -> torch.Tensor:
        """``[V_p, e]``."""
        weight: torch.Tensor = self.get_submodule("2").weight
        return weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., d + g] -> [..., e]``."""
        projected: torch.Tensor = self.get_submodule("0")(rows)
        return F.silu(projected)
