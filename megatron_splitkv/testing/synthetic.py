"""Feature stores with random content, for tests of every room."""

import os
from collections.abc import Sequence

import torch

from megatron_splitkv.data.meta import StoreMeta, TargetInfo
from megatron_splitkv.data.store import FeatureStore
from megatron_splitkv.data.store_writer import FeatureStoreWriter


def make_synthetic_store(
    path: str | os.PathLike[str],
    lengths: Sequence[int],
    *,
    hidden_size: int = 8,
    vocab_size: int = 64,
    num_target_layers: int = 6,
    target_layer_ids: Sequence[int] = (1, 3),
    prompt_length: int = 0,
    dtype: str = "float32",
    final_hidden: bool = False,
    seed: int = 0,
    max_shard_bytes: int = 1 << 16,
) -> FeatureStore:
    """Write a small store of random documents and open it.

    Args:
        path: folder to create.
        lengths: tokens of each document.
        hidden_size: d of the pretended target.
        vocab_size: rows of its embedding; the last id is the mask token, the one before it eos,
            and no document contains either.
        num_target_layers: layers of the pretended target.
        target_layer_ids: tapped layers.
        prompt_length: first tokens of each document that carry no loss.
        dtype: ``float32`` or ``bfloat16``.
        final_hidden: store final hidden states, too; everything else is as without them.
        seed: equal seeds and arguments give equal stores.
        max_shard_bytes: small, so that a test's store has several shards.
    """
    generator = torch.Generator().manual_seed(seed)
    meta = StoreMeta(
        TargetInfo(
            id="synthetic",
            checksum=f"seed-{seed}",
            num_layers=num_target_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            mask_token_id=vocab_size - 1,
            eos_token_ids=(vocab_size - 2,),
        ),
        tuple(target_layer_ids),
        dtype,
        final_hidden,
    )
    finals = torch.Generator().manual_seed(seed + 1)
    with FeatureStoreWriter(path, meta, max_shard_bytes=max_shard_bytes) as writer:
        writer.write_frozen(
            torch.randn(vocab_size, hidden_size, generator=generator),
            torch.randn(vocab_size, hidden_size, generator=generator),
        )
        for length in lengths:
            writer.add_document(
                torch.randint(vocab_size - 2, (length,), generator=generator),
                torch.arange(length) >= prompt_length,
                torch.randn(length, meta.feature_width, generator=generator),
                torch.randn(length, hidden_size, generator=finals) if final_hidden else None,
            )
    return FeatureStore(path)
