"""Tiny drafters of every kind, with random tensors by their public names."""

from dataclasses import fields, replace

import torch

from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.export.zlab import zlab_shapes
from tests.drafter.harness import TINY

# What a config.json does not say has its default, so that it comes back as it went.
PLAIN = replace(TINY, loss_decay_gamma=7.0, eos_token_ids=(58, 59), pad_token_id=57)
SLIDING = replace(
    PLAIN,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=5,
    input_embedding_scale=1.5,
    final_logit_softcapping=3.0,
)
_SHARED = {field.name: getattr(PLAIN, field.name) for field in fields(DFlashConfig)}
DOMINO = DominoConfig(**_SHARED, emb_dim=10, gru_hidden_dim=12)
DSPARK = DSparkConfig(**(_SHARED | {"loss_decay_gamma": 4.0}), markov_rank=6)
VARIANTS: dict[str, DFlashConfig] = {
    "dflash": PLAIN,
    "sliding": SLIDING,
    "domino": DOMINO,
    "domino unshifted": replace(DOMINO, shift_label=False, pure_draft_prefix_len=0),
    "dspark": DSPARK,
    "dspark gated": replace(DSPARK, markov_head_type="gated"),
    "dspark rnn": replace(DSPARK, markov_head_type="rnn"),
}


def random_tensors(
    config: DFlashConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Every tensor random, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(dtype)
        for name, shape in zlab_shapes(config).items()
    }


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
