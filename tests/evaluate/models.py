"""Tiny random targets and drafters for them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from megatron_splitkv.data.target import import_transformers
from megatron_splitkv.drafter import DFlashConfig
from megatron_splitkv.evaluate.greedy import GreedyText, greedy_decode
from megatron_splitkv.evaluate.speculative import SpeculativeText, speculative_decode
from megatron_splitkv.export.zlab import zlab_shapes

VOCAB, LAYERS, HIDDEN = 97, 5, 64
EOS, MASK = 95, 96
HABIT = 40

DRAFTER = DFlashConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    ffn_hidden_size=96,
    num_attention_heads=6,  # 6 heads of 16: wider than the hidden size
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    num_target_layers=LAYERS,
    target_layer_ids=(0, 2, 3),
    mask_token_id=MASK,
    block_size=6,
    rope_theta=5e3,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    eos_token_ids=(EOS,),
)


@cache
def tiny_target(kind: str = "qwen3") -> Any:
    """A random target with a habit, so that a random drafter on top of it is sometimes right.

    All embeddings share a direction that survives the residual stream, the mask token's more than
    the others', and the head hears one token in it.
    """
    transformers = import_transformers()
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.1,
    }
    torch.manual_seed(3)
    slides = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    elif kind == "qwen3_5":  # gated delta rule in every layer but one
        linear = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        }
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**common, **linear))
    elif kind == "mistral":  # every layer slides
        config = transformers.MistralConfig(**common, sliding_window=12)
        model = transformers.MistralForCausalLM(config)
    elif kind == "gemma3":  # scaled embeddings, two rotary bases
        config = transformers.Gemma3TextConfig(**common, sliding_window=12, layer_types=slides)
        model = transformers.Gemma3ForCausalLM(config)
    elif kind == "nested":  # the text model inside one that also takes images
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS,
            num_attention_heads=2, image_size=8, patch_size=4,
        )  # fmt: skip
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**common),
            vision_config=vision,
            image_token_index=90,
        )
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        sliding = {}
        if kind == "sliding":
            sliding = {
                "use_sliding_window": True,
                "sliding_window": 12,
                "max_window_layers": 0,
                "layer_types": slides,
            }
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, **sliding))
    model = model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings().weight
    embedding += 0.08
    embedding[MASK] += 1.0  # the target never reads it
    model.lm_head.weight[HABIT] += 0.06
    return model


def random_zlab_tensors(
    config: DFlashConfig = DRAFTER, seed: int = 0, std: float = 0.1
) -> dict[str, torch.Tensor]:
    """Every tensor random, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * std + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in zlab_shapes(config).items()
    }


def prompts(count: int, seed: int = 1, length: int = 20) -> list[list[int]]:
    """Random prompts of different lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS, (length + i,), generator=generator).tolist() for i in range(count)]


def decode_greedily(
    target: Any, token_ids: Sequence[Sequence[int]], **options: Any
) -> list[GreedyText]:
    """`greedy_decode` in the order of the prompts."""
    texts = dict(greedy_decode(target, token_ids, **options))
    return [texts[i] for i in range(len(token_ids))]


def decode_speculatively(
    target: Any, drafter: Any, token_ids: Sequence[Sequence[int]], **options: Any
) -> list[SpeculativeText]:
    """`speculative_decode` in the order of the prompts."""
    texts = dict(speculative_decode(target, drafter, token_ids, **options))
    return [texts[i] for i in range(len(token_ids))]
