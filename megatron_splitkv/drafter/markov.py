"""What DSpark's Markov head adds to a slot's logits, in plain torch, for training and decoding.

The bias is ``markov_w2 @ latent``, of low rank r. The latent vector comes from h, the backbone's
output of the slot, and ``e = markov_w1[t]``, the row of the token t before the slot's label (the
anchor's token for slot 0):

- vanilla: ``e`` itself.
- gated: ``sigmoid(gate_proj [h; e]) * e``.
- rnn: a state s, zero before slot 0, goes through the block. ``joint_proj [s; e; h]`` gives three
  vectors g, c and o: the latent is ``tanh(o)``, the next state
  ``sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``.

Both projections have biases. The confidence head reads ``[h; e]`` with every kind of head.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/markov_head.py` (`VanillaMarkov`,
`GatedMarkovHead`, `RNNHead`) and `deepspec/modeling/dspark/qwen3/modeling.py`; SGLang's `dspark`
draft models have the same heads.

Shape legend: r rank of the Markov head, d hidden size.
"""

import torch
import torch.nn.functional as F


def gated(
    hidden: torch.Tensor, embedded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Latent vectors of a gated head.

    Args:
        hidden: h.
        embedded: e.
        weight: of ``gate_proj``.
        bias: of ``gate_proj``.

    Shape:
        ``hidden [..., d]``, ``embedded [..., r]``, ``weight [r, d + r]``; the result ``[..., r]``.
    """
    return torch.sigmoid(F.linear(torch.cat([hidden, embedded], dim=-1), weight, bias)) * embedded


def rnn_inputs(
    hidden: torch.Tensor, embedded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """What ``joint_proj`` makes of all but the state: any number of slots at once.

    Shape:
        ``hidden [..., d]``, ``embedded [..., r]``, ``weight [3 r, 2 r + d]``; the result
        ``[..., 3 r]``.
    """
    rank = embedded.shape[-1]
    return F.linear(torch.cat([embedded, hidden], dim=-1), weight[:, rank:], bias)


def rnn_step(
    inputs: torch.Tensor, state: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slot of an rnn head.

    Args:
        inputs: of `rnn_inputs`.
        state: s, zeros at slot 0.
        weight: of ``joint_proj``.

    Returns:
        The slot's latent vector and the next slot's state.

    Shape:
        ``inputs [n, 3 r]``, ``state [n, r]``; the results ``[n, r]``.
    """
    gate, candidate, output = (inputs + F.linear(state, weight[:, : state.shape[-1]])).chunk(3, -1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
