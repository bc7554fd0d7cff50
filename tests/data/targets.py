"""Tiny random targets of many architectures."""

from typing import Any

import torch
import transformers

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# As many layers as the text model: it must not be taken for it.
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
JAMBA: dict[str, Any] = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}


def longrope_config() -> Any:
    """A target whose RoPE changes above 64 tokens."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 8.0]}
    return transformers.Phi3Config(
        **TEXT,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        max_position_embeddings=256,
        original_max_position_embeddings=64,
    )


def random_target(kind: str) -> Any:
    """A model in eval mode; `nested-*` have their text model inside a multimodal one."""
    t = transformers
    torch.manual_seed(0)
    build = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, eos_token_id=2, bos_token_id=2)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**TEXT, sliding_window=7)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**TEXT, sliding_window=7)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**TEXT, sliding_window=7)),
        "mamba2": lambda: t.Mamba2ForCausalLM(
            t.Mamba2Config(**TEXT, num_heads=8, expand=2, state_size=8, n_groups=1, chunk_size=8)
        ),
        "qwen3_5": lambda: t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**TEXT, **DELTA_RULE)),
        "phi3": lambda: t.Phi3ForCausalLM(longrope_config()),
        "jamba": lambda: t.JambaForCausalLM(t.JambaConfig(**TEXT, **JAMBA)),
        "nested-gemma3": lambda: t.Gemma3ForConditionalGeneration(
            t.Gemma3Config(
                text_config={**TEXT, "sliding_window": 7},
                vision_config=VISION,
                mm_tokens_per_image=4,
                image_token_index=60,
                boi_token_index=61,
                eoi_token_index=62,
            )
        ),
        "nested-llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config=t.LlamaConfig(**TEXT),
                vision_config=t.CLIPVisionConfig(**VISION),
                image_token_index=60,
            )
        ),
        "nested-qwen3_5": lambda: t.Qwen3_5ForConditionalGeneration(
            t.Qwen3_5Config(
                text_config={**TEXT, **DELTA_RULE},
                vision_config={
                    "depth": 4,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_heads": 2,
                    "out_hidden_size": 32,
                    "patch_size": 4,
                    "num_position_embeddings": 4,
                },
                image_token_id=60,
                video_token_id=61,
                vision_start_token_id=62,
                vision_end_token_id=63,
            )
        ),
    }
    return build[kind]().eval().requires_grad_(False)


def random_documents(lengths: list[int], vocab_size: int = 60) -> list[torch.Tensor]:
    """Random token ids of the given lengths."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]
