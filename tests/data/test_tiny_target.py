"""The tiny target learns, repeats itself exactly, and is an ordinary Hugging Face folder."""

from pathlib import Path

import pytest
import torch

from megatron_splitkv.config import ConfigError
from megatron_splitkv.data.target import load_target, load_tokenizer
from megatron_splitkv.data.tiny_target import (
    VOCAB_SIZE,
    TinyTargetConfig,
    build_tiny_target,
    train_tiny_target,
)

TEXT = b"def add(left, right):\n    return left + right\n\n" * 40
QUICK = TinyTargetConfig(hidden_size=32, steps=40, batch_size=8, window=32, learning_rate=1e-2)


def test_it_learns_its_text_the_same_way_each_time() -> None:
    told: list[tuple[int, int]] = []
    first, loss = train_tiny_target(TEXT, QUICK, lambda done, total: told.append((done, total)))
    again, loss_again = train_tiny_target(TEXT, QUICK)
    assert loss < 3.0  # ln 258 = 5.6 before training
    assert loss == loss_again
    for left, right in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    assert told[-1] == (40, 40)


def test_seed_changes_the_weights() -> None:
    one = build_tiny_target(TinyTargetConfig(hidden_size=32, seed=1))
    two = build_tiny_target(TinyTargetConfig(hidden_size=32, seed=2))
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_default_size() -> None:
    parameters = sum(p.numel() for p in build_tiny_target(TinyTargetConfig()).parameters())
    assert 0.5e6 < parameters < 0.7e6


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="20 bytes of text"):
        train_tiny_target(b"x" * 20, QUICK)


def test_saved_folder_gives_model_and_byte_tokenizer(target_folder: Path) -> None:
    model, tokenizer = load_target(target_folder), load_tokenizer(target_folder)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == VOCAB_SIZE
    text = "def f(é):\n\t return '\x00€' + \"x\"  \n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (256, 257)
