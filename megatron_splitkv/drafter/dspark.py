"""The DSpark drafter: DFlash's backbone, a Markov head and a confidence head.

The backbone drafts all slots at once, blind to what the other slots choose. The Markov head adds to
a slot's logits a low-rank bias that knows the token before the slot's label (`drafter.markov`). In
training that token is the real one, so all slots run at once; a draft step goes through the slots
in order (`evaluate.dspark_head`). The confidence head foresees how likely the slot's token is to be
accepted.

Labels are shifted: slot k of a block with anchor a predicts the token at a + k + 1, slot 0 is
trained. A block is trained up to its first label that is not supervised: tokens behind it would
never be drafted in one piece with those before.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/qwen3/modeling.py` (modules, labels, the
teacher one position before the label, features of the confidence head),
`deepspec/modeling/dspark/common.py` (`build_eval_mask`) and `deepspec/modeling/dspark/loss.py`.

Shape legend: N blocks of B slots of this CP rank, Q = N * B draft rows, d hidden size, r rank of
the Markov head, V_p tokens of this TP rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_splitkv.comm import all_reduce_sum
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.drafter.markov import gated, rnn_inputs, rnn_step
from megatron_splitkv.drafter.model import DFlashModel
from megatron_splitkv.drafter.vocabulary_matrix import VocabularyMatrix
from megatron_splitkv.loss.dspark import chunked_dspark_loss, confidence_loss, leading_slots
from megatron_splitkv.plan import ContextPlan


class DSparkModel(DFlashModel):
    """A DSpark drafter; arguments as of `DFlashModel`, `dflash` is a `DSparkConfig`.

    Matrices with a row for every token are split over TP by vocabulary, like the target's head. The
    others are small and the same on every TP rank, as are their rows and so their gradients.
    """

    dflash: DSparkConfig

    def build_heads(self) -> None:
        """Make the Markov head and the confidence head."""
        self.markov_head = MarkovHead(self.config, self.dflash, self.tp_group)
        self.confidence_head = _ConfidenceHead(self.config, self.dflash)

    def forward(
        self, batch: Mapping[str, torch.Tensor], plan: ContextPlan
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """See `DFlashModel.forward`; the batch has `block_teacher_hidden`."""
        mask = leading_slots(batch["block_label_mask"], self.dflash.block_size)
        return super().forward({**batch, "block_label_mask": mask}, plan)

    def loss(
        self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Price the drafts by all three losses, see `loss.dspark`.

        Returns:
            numerator: their weighted sum.
            predictions: of the biased logits.
            report: ``ce loss``, ``l1 loss``, ``confidence loss``, ``confidence error`` (mean
                distance of the foreseen acceptance from the real one) and ``sampled_accept_len``,
                what speculative sampling would reach.
        """
        dspark = self.dflash
        hidden = hidden.masked_fill((weights == 0)[:, None], 0.0)  # whatever they hold
        embedded = self.markov_head.embed(batch["block_real_tokens"])
        found = chunked_dspark_loss(
            hidden,
            self.markov_head.latent(hidden, embedded),
            self.vocabulary.head_weight,
            self.markov_head.markov_w2.weight,
            batch["block_labels"],
            weights,
            batch["block_teacher_hidden"],
            ce_weight=dspark.ce_weight,
            l1_weight=dspark.l1_weight,
            softcap=dspark.final_logit_softcapping,
            tp_group=self.tp_group,
            vocab_start=self.vocabulary.vocab_start,
        )
        confidence = self.confidence_head(hidden, embedded)
        of_confidence = confidence_loss(confidence, found.accept_rate, weights)
        numerator = found.numerator + dspark.confidence_weight * of_confidence

        total = weights.sum()
        error = (confidence.detach().float().sigmoid() - found.accept_rate).abs()
        kept = batch["block_keep_mask"]
        # The accept rate of slots that are not trained is 0.
        accepted = 1 + found.accept_rate.view(-1, dspark.block_size).cumprod(dim=1).sum(dim=1)
        pairs = {
            "ce loss": (found.cross_entropy, total),
            "l1 loss": (found.distance, total),
            "confidence loss": (of_confidence.detach(), total),
            "confidence error": ((error * weights).sum(), total),
            "sampled_accept_len": ((accepted * kept).sum(), kept.sum()),
        }
        report = {name: torch.stack([a.float(), b.float()]) for name, (a, b) in pairs.items()}
        return numerator, found.predictions, report


class MarkovHead(MegatronModule):
    """The parameters of the bias that a slot's logits get; children have their public names.

    Args:
        config: Megatron's configuration.
        dspark: the drafter.
        tp_group: ranks that share the vocabulary.
    """

    def __init__(
        self, config: TransformerConfig, dspark: DSparkConfig, tp_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.block_size = dspark.block_size
        rank, dtype = dspark.markov_rank, config.params_dtype
        self.markov_w1, self.markov_w2 = (
            VocabularyMatrix(dspark.vocab_size, rank, dtype=dtype, tp_group=tp_group)
            for _ in range(2)
        )
        self.gate_proj = self.joint_proj = None
        if dspark.markov_head_type == "gated":
            self.gate_proj = _linear(dspark.hidden_size + rank, rank, dtype)
        if dspark.markov_head_type == "rnn":
            self.joint_proj = _linear(2 * rank + dspark.hidden_size, 3 * rank, dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look the tokens before the labels up; the gradient reaches the rows that ranks hold.

        Shape:
            ``tokens`` int64 ``[Q]``, equal on all TP ranks; the result ``[Q, r]``.
        """
        local = tokens - self.markov_w1.vocab_start
        is_local = (local >= 0) & (local < self.markov_w1.weight.shape[0])
        rows = torch.nn.functional.embedding(torch.where(is_local, local, 0), self.markov_w1.weight)
        summed: torch.Tensor = _SumOverVocabulary.apply(rows * is_local[:, None], self.tp_group)
        return summed

    def latent(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What `markov_w2` projects to the bias of every slot, see `drafter.markov`.

        Args:
            hidden: the backbone's output.
            embedded: of `embed`.

        Shape:
            ``hidden [Q, d]``, ``embedded [Q, r]``; the result ``[Q, r]``.
        """
        if self.gate_proj is not None:
            return gated(hidden, embedded, self.gate_proj.weight, self.gate_proj.bias)
        if self.joint_proj is None:
            return embedded
        weight = self.joint_proj.weight
        inputs = rnn_inputs(hidden, embedded, weight, self.joint_proj.bias)
        slots = inputs.view(-1, self.block_size, inputs.shape[-1]).unbind(dim=1)
        state = embedded.new_zeros(slots[0].shape[0], embedded.shape[-1])
        latents = []
        for slot in slots:
            latent, state = rnn_step(slot, state, weight)
            latents.append(latent)
        return torch.stack(latents, dim=1).flatten(0, 1)


class _ConfidenceHead(MegatronModule):
    """One logit a slot; its child has its public name."""

    def __init__(self, config: TransformerConfig, dspark: DSparkConfig) -> None:
        super().__init__(config=config)
        self.proj = _linear(dspark.hidden_size + dspark.markov_rank, 1, config.params_dtype)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """``[Q, d]`` and ``[Q, r] -> [Q]``."""
        logits: torch.Tensor = self.proj(torch.cat([hidden, embedded], dim=-1))
        return logits.squeeze(-1)


class _SumOverVocabulary(torch.autograd.Function):
    """Sum over TP of what each rank looked up; the sum's gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
        return all_reduce_sum(rows, tp_group, label="markov_embedding")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0], None


def _linear(inputs: int, outputs: int, dtype: torch.dtype) -> torch.nn.Linear:
    """A projection whose bias is zero; `initialize_weights` draws its matrix."""
    linear = torch.nn.Linear(inputs, outputs, dtype=dtype)
    torch.nn.init.zeros_(linear.bias)
    return linear
