"""The DFlash drafter as a Megatron model.

Shape legend: S context rows and N blocks of B slots of this CP rank, Q = N * B draft rows, C tapped
target layers, d hidden size, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)

from megatron_splitkv.attention import SplitKVPackedSeqParams
from megatron_splitkv.attention.placement import Places
from megatron_splitkv.config import ConfigError
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.feature_projection import FeatureProjection
from megatron_splitkv.drafter.frozen import FrozenVocabulary
from megatron_splitkv.drafter.initialization import initialize_weights
from megatron_splitkv.drafter.rope import rotary_cos_sin
from megatron_splitkv.drafter.specs import with_window
from megatron_splitkv.drafter.transformer_config import check_transformer_config
from megatron_splitkv.loss import (
    chunked_draft_loss,
    drafter_report,
    fixed_point_loss,
    loggable,
    slot_weights,
)
from megatron_splitkv.plan import ContextPlan

_SAMPLED_HEAD_ROWS = 1024


class DFlashModel(MegatronModule):
    """A DFlash drafter with the frozen embedding and head of its target.

    Args:
        config: Megatron's configuration, e.g. of `DFlashConfig.to_transformer_config`.
        dflash: the drafter.
        layer_spec: one layer, see `get_dflash_layer_spec`.
        embedding_weight: the target's embedding.
        head_weight: the target's output head, None if it is the embedding.
        pg_collection: process groups; Megatron's global ones if None.
        final_norm_init: initial weight of the final norm. None chooses it so that the first
            logits have a standard deviation of at most one: the first loss is then close to ln V
            whatever the scale of the target's head.
        init_seed: seed of the initial weights, which depend on nothing else.

    Shape:
        ``embedding_weight``, ``head_weight`` ``[V, d]``.

    Raises:
        ConfigError: Megatron's configuration or the target's tensors do not fit the drafter.
    """

    def __init__(
        self,
        config: TransformerConfig,
        dflash: DFlashConfig,
        *,
        layer_spec: ModuleSpec,
        embedding_weight: torch.Tensor,
        head_weight: torch.Tensor | None,
        pg_collection: ProcessGroupCollection | None = None,
        final_norm_init: float | None = None,
        init_seed: int = 1234,
    ) -> None:
        super().__init__(config=config)
        check_transformer_config(config, dflash)
        _check_vocabulary(dflash, embedding_weight, head_weight)
        self.model_type = ModelType.encoder_or_decoder
        self.dflash = dflash
        # Share of the training that is done, in [0, 1]; kept by the forward step.
        self.training_progress = 0.0
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = self.pg_collection.tp
        self.cp_group = self.pg_collection.cp

        # Megatron's linear with any backend: Transformer Engine's cannot gather its output.
        self.fc = FeatureProjection(
            dflash.feature_width,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            tp_group=self.tp_group,
        )
        norm = layer_spec.submodules.input_layernorm
        self.hidden_norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.decoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[with_window(layer_spec, window) for window in dflash.windows],
                layer_norm=norm,
            ),
            pg_collection=self.pg_collection,
        )
        self.build_heads()
        initialize_weights(
            self,
            init_method=config.init_method,
            output_layer_init_method=config.output_layer_init_method,
            tp_group=self.tp_group,
            seed=init_seed,
        )
        if final_norm_init is None:
            final_norm_init = _final_norm_init(
                embedding_weight if head_weight is None else head_weight
            )
        torch.nn.init.constant_(self.decoder.final_layernorm.weight, final_norm_init)
        self.vocabulary = FrozenVocabulary(
            embedding_weight,
            head_weight,
            mask_token_id=dflash.mask_token_id,
            dtype=config.params_dtype,
            tp_group=self.tp_group,
        )

    def set_input_tensor(self, input_tensor: object) -> None:
        """Megatron's schedules hand over what an earlier pipeline stage sent: nothing here."""

    def forward(
        self, batch: Mapping[str, torch.Tensor], plan: ContextPlan
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Draft this rank's blocks and price the drafts: what Megatron wants of a loss function.

        Args:
            batch: this CP rank's rows and blocks, see `batch.get_batch_on_this_cp_rank`.
            plan: who holds what, the same on all ranks of the TP x CP group.

        Returns:
            loss: this rank's part, scaled for Megatron's integer token count.
            num_tokens: int32; over ranks and micro-batches ``loss / num_tokens`` is the mean loss.
            report: fp32 (numerator, denominator) pairs of this rank for the log, with ``lm loss``
                and the values of `loss.drafter_report`.
        """
        dflash = self.dflash
        hidden = self.draft(batch, plan)
        weights = slot_weights(
            batch["block_label_mask"],
            dflash.block_size,
            # D-PACE's own weights come with the loss.
            dflash.loss_decay_gamma if dflash.loss_weights == "decay" else math.inf,
            dflash.first_trained_slot,
        )
        numerator, predictions, more = self.loss(hidden, batch, weights)
        loss, num_tokens = fixed_point_loss(numerator, weights, cp_group=self.cp_group)
        report = {
            "lm loss": torch.stack([numerator.detach(), weights.sum()]),
            **drafter_report(
                predictions,
                batch["block_labels"],
                batch["block_label_mask"],
                batch["block_keep_mask"],
                dflash.block_size,
                dflash.first_trained_slot,
            ),
            **more,
        }
        return loss, num_tokens, loggable(report)

    def loss(
        self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Price the drafts through the target's frozen head.

        Args:
            hidden: of `draft`.
            batch: as in `forward`.
            weights: of the slots, 0 where there is nothing to predict. A loss that weighs by what
                it finds writes back what the slots weighed.

        Returns:
            numerator: weighted sum of the losses of this rank's rows, fp32, complete over tensor
                parallelism.
            predictions: predicted tokens, `loss.IGNORED_PREDICTION` where the weight is 0.
            report: further fp32 (numerator, denominator) pairs for the log.

        Shape:
            ``hidden [Q, d]``, ``weights`` and predictions ``[Q]``.
        """
        dflash = self.dflash
        teaches, dpace = dflash.distillation_weight > 0, dflash.loss_weights == "dpace"
        priced = chunked_draft_loss(
            hidden,
            self.vocabulary.head_weight,
            batch["block_labels"],
            weights,
            tp_group=self.tp_group,
            vocab_start=self.vocabulary.vocab_start,
            softcap=dflash.final_logit_softcapping,
            dpace_block_size=dflash.block_size if dpace else None,
            teacher_hidden=batch["block_teacher_hidden"] if teaches else None,
            distillation_weight=dflash.distillation_weight,
        )
        weights.copy_(priced.weights)
        report = {"kl to target": torch.stack([priced.divergence, priced.weights.sum()])}
        return priced.numerator, priced.predictions, report if teaches else {}

    def build_heads(self) -> None:
        """Make the parameters that a kind of drafter has beside the backbone: none here.

        Called once, before the weights are drawn. Under the public names of `head_shapes`.
        """

    def places(self, plan: ContextPlan) -> Places:
        """Where the layers gather queries and scatter outputs for a micro-batch."""
        return self.decoder.layers[0].self_attention.places(plan, self.fc.weight)

    @property
    def communication(self) -> str:
        """How the layers communicate, in words that are equal on ranks that fit together."""
        return "; ".join(layer.self_attention.communication for layer in self.decoder.layers)

    def draft(self, batch: Mapping[str, torch.Tensor], plan: ContextPlan) -> torch.Tensor:
        """Return the final hidden states of this rank's draft rows, ready for the target's head.

        Args:
            batch: as in `forward`; labels are not read.
            plan: as in `forward`.

        Shape:
            ``[Q, d]``.
        """
        features = batch["context_features"].to(self.fc.weight.dtype)
        context = self.hidden_norm(self.fc(features[:, None])[0])  # [S, 1, d]
        blocks = self.vocabulary.embed_blocks(batch["block_tokens"], self.dflash.block_size)
        if self.dflash.input_embedding_scale != 1.0:
            blocks = blocks * self.dflash.input_embedding_scale
        positions = [batch["context_positions"], batch["block_positions"]]
        layers = (layer.self_attention for layer in self.decoder.layers)
        if any(layer.places(plan, self.fc.weight).gather == "hidden" for layer in layers):
            of_all_ranks = torch.from_numpy(plan.block_positions())
            positions.append(of_all_ranks.to(features.device, non_blocking=True))
        hidden = self.decoder(
            hidden_states=blocks[:, None],
            attention_mask=None,
            context=context,
            rotary_pos_emb=rotary_cos_sin(
                torch.cat(positions), self.dflash.head_dim, self.dflash.rope_theta
            ),
            packed_seq_params=SplitKVPackedSeqParams(plan=plan),
        )
        return hidden[:, 0]


def _check_vocabulary(
    dflash: DFlashConfig, embedding_weight: torch.Tensor, head_weight: torch.Tensor | None
) -> None:
    expected = (dflash.vocab_size, dflash.hidden_size)
    for name, weight in (("embedding", embedding_weight), ("output head", head_weight)):
        if weight is not None and tuple(weight.shape) != expected:
            raise ConfigError(
                f"the target's {name} is {tuple(weight.shape)}, the drafter needs {expected}"
            )


def _final_norm_init(head_weight: torch.Tensor) -> float:
    """Scale that gives a unit-RMS row logits of standard deviation one; never above one."""
    rows = head_weight[:: math.ceil(head_weight.shape[0] / _SAMPLED_HEAD_ROWS)].double()
    deviation = rows.square().sum(dim=1).mean().sqrt()
    return 1.0 / max(1.0, float(deviation))
