"""A tiny random target of the drafters in the tests, and stores of its documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter
from megatron_splitkv.data.target import import_transformers, load_target, target_checksum
from megatron_splitkv.data.target_states import document_states
from tests.drafter.harness import TINY

LENGTHS = (40, 31, 1, 57, 90, 2, 23, 64, 18, 9, 77, 12)


def save_target(folder: Path, seed: int = 3) -> Path:
    """Save a random model with the embedding's shape of `TINY`: its target's width and depth."""
    transformers = import_transformers()
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=48,
        num_hidden_layers=TINY.num_target_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,  # features of the size of trained ones
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def info(target: Path) -> TargetInfo:
    return TargetInfo(
        id="tiny",
        checksum=target_checksum(target),
        num_layers=TINY.num_target_layers,
        hidden_size=TINY.hidden_size,
        vocab_size=TINY.vocab_size,
        mask_token_id=TINY.mask_token_id,
    )


def random_documents(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(TINY.mask_token_id, (n,), generator=generator) for n in lengths]


def save_store(
    folder: Path, target: Path, lengths: Sequence[int] = LENGTHS, *, tokens_only: bool = False
) -> FeatureStore:
    """A store of random documents, with the target's features, or with their tokens alone."""
    model: Any = load_target(target)
    if tokens_only:
        meta = StoreMeta.tokens_only(info(target))
    else:
        meta = StoreMeta(info(target), TINY.target_layer_ids, "float32", final_hidden=True)
    documents = random_documents(lengths)
    pieces = {p.document: p for p in document_states(model, documents, TINY.target_layer_ids)}
    with FeatureStoreWriter(folder, meta) as writer:
        writer.write_frozen(
            model.get_input_embeddings().weight, model.get_output_embeddings().weight
        )
        for i, ids in enumerate(documents):
            mask = torch.arange(ids.numel()) >= 1
            if tokens_only:
                writer.add_document(ids, mask)
            else:
                writer.add_document(ids, mask, pieces[i].features, pieces[i].final_hidden)
    return FeatureStore(folder)
