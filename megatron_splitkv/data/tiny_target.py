"""A small real target: a byte-level language model, trained in minutes on a CPU.

It has a public architecture (Qwen3), is saved as an ordinary Hugging Face folder with a tokenizer,
and from there on is treated like any other target.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import Progress, import_transformers, silent

EOS_TOKEN_ID = 256
MASK_TOKEN_ID = 257
VOCAB_SIZE = 258


@dataclass(frozen=True)
class TinyTargetConfig:
    """Shape and training of the tiny target; the defaults have 0.6 M parameters.

    Args:
        hidden_size: d.
        num_layers: decoder layers.
        steps: optimizer steps.
        batch_size: windows a step.
        window: bytes of one training window.
        learning_rate: peak, after a linear warm-up and before a cosine decay.
        seed: of the weights and of the order of windows.
    """

    hidden_size: int = 96
    num_layers: int = 5
    steps: int = 900
    batch_size: int = 16
    window: int = 128
    learning_rate: float = 2e-3
    seed: int = 0


def build_tiny_target(config: TinyTargetConfig) -> Any:
    """The untrained model."""
    transformers = import_transformers()
    num_heads = 4
    torch.manual_seed(config.seed)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            head_dim=config.hidden_size // num_heads,
            max_position_embeddings=8 * config.window,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=None,
        )
    )


def train_tiny_target(
    text: bytes, config: TinyTargetConfig, progress: Progress = silent
) -> tuple[Any, float]:
    """Train a byte-level model on random windows of a text.

    Args:
        text: training text.
        config: shape, steps and seed.
        progress: told the steps done.

    Returns:
        The model in eval mode, frozen, and the mean loss (nats a byte) of the last tenth of the
        steps.

    Raises:
        ConfigError: less text than one window.
    """
    if len(text) <= config.window:
        raise ConfigError(
            f"{len(text)} bytes of text to train the tiny target, needs more than {config.window}"
        )
    model = build_tiny_target(config)
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, config.window + 1, 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    generator = torch.Generator().manual_seed(config.seed)
    tail = max(1, config.steps // 10)
    tail_loss = 0.0
    for step in range(config.steps):
        picked = torch.randint(len(windows), (config.batch_size,), generator=generator)
        batch = windows[picked].long()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step >= config.steps - tail:
            tail_loss += loss.item() / tail
        progress(step + 1, config.steps)
    return model.eval().requires_grad_(False), tail_loss


def _rate(step: int, steps: int) -> float:
    warm_up = max(1, min(100, steps // 9))
    return min(1.0, (step + 1) / warm_up) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def save_tiny_target(model: Any, folder: str | os.PathLike[str]) -> None:
    """Save model and byte tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are the bytes of the UTF-8 text (plus eos and mask)."""
    transformers = import_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )
    ids = (fast.convert_tokens_to_ids("<|end|>"), fast.convert_tokens_to_ids("<|mask|>"))
    if ids != (EOS_TOKEN_ID, MASK_TOKEN_ID):
        raise RuntimeError(f"byte tokenizer gave its special tokens the ids {ids}")
    return fast


def _byte_symbols() -> list[str]:
    # Byte-level tokenizers write each byte as one printable character: printable Latin-1 bytes
    # stand for themselves, the others for the characters from U+0100 upwards, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
