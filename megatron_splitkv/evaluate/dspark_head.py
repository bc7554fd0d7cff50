"""DSpark's proposals: slot after slot, each token chosen with a bias by the one before it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.drafter.markov import gated, rnn_inputs, rnn_step
from megatron_splitkv.evaluate.heads import vocabulary_logits


class DSparkHead:
    """Greedy rollout of a DSpark drafter, over several texts at once.

    The backbone's logits of all slots are one product; then slot after slot the Markov head reads
    the token chosen last, the anchor's at first, and adds its bias to the slot's logits.

    Args:
        config: the drafter.
        tensors: of `DSparkConfig.head_shapes`.

    Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/markov_head.py`, `sample_block_tokens`.
        What a slot reads: `drafter.markov`.
    """

    def __init__(self, config: DSparkConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._tensors = {name.removeprefix("markov_head."): t for name, t in tensors.items()}

    def propose(
        self,
        hidden: torch.Tensor,
        anchor_tokens: torch.Tensor,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        """See `ProposalHead.propose`."""
        return self.rollout(hidden, anchor_tokens, head)[0]

    def rollout(
        self, hidden: torch.Tensor, anchor_tokens: torch.Tensor, head: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Proposals, and how likely the drafter holds each to be accepted if those before it are.

        Args:
            hidden: the backbone's output for the slots of each text's block.
            anchor_tokens: the real token in slot 0.
            head: the target's output head.

        Returns:
            Proposals and the confidence head's probabilities, fp32.

        Shape:
            ``hidden [n, b, d]``, ``anchor_tokens int64[n]``, ``head [V, d]``; results ``[n, b]``.
        """
        w1, w2 = self._tensors["markov_w1.weight"], self._tensors["markov_w2.weight"]
        logits = vocabulary_logits(self._config, hidden, head)
        hidden = hidden.to(w1.dtype)
        state = hidden.new_zeros(hidden.shape[0], w1.shape[1])
        tokens, proposals, read = anchor_tokens, [], []
        for i in range(hidden.shape[1]):
            embedded = F.embedding(tokens, w1)
            latent, state = self._latent(hidden[:, i], embedded, state)
            tokens = (logits[:, i] + F.linear(latent, w2)).argmax(dim=-1)
            proposals.append(tokens)
            read.append(embedded)
        confidence = F.linear(
            torch.cat([hidden, torch.stack(read, dim=1)], dim=-1),
            self._tensors["confidence_head.proj.weight"],
            self._tensors["confidence_head.proj.bias"],
        )
        return torch.stack(proposals, dim=1), confidence.squeeze(-1).float().sigmoid()

    def _latent(
        self, hidden: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot's latent vector, and the state that the next slot starts from."""
        if self._config.markov_head_type == "gated":
            weight, bias = self._tensors["gate_proj.weight"], self._tensors["gate_proj.bias"]
            return gated(hidden, embedded, weight, bias), state
        if self._config.markov_head_type == "rnn":
            weight, bias = self._tensors["joint_proj.weight"], self._tensors["joint_proj.bias"]
            return rnn_step(rnn_inputs(hidden, embedded, weight, bias), state, weight)
        return embedded, state
