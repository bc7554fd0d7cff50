"""Overrides that make a recipe small enough to be trained on a CPU."""

from pathlib import Path

from megatron_splitkv.data.store import FeatureStore
from tests.drafter.harness import TINY
from tests.online.tiny import LENGTHS, save_store, save_target
from tests.train.launches import make_store

# The same drafter as `tests.train.launches.TINY_DRAFTER`.
_DRAFTER = {
    "model.transformer.num_layers": 2,
    "model.transformer.ffn_hidden_size": 48,
    "model.transformer.num_attention_heads": 4,
    "model.transformer.num_query_groups": 2,
    "model.transformer.kv_channels": 8,
    "model.seq_length": 96,
    "model.block_size": 4,
    "model.max_position_embeddings": 96,
    "model.bos_token_id": "null",
    "dataset.num_anchors": 6,
    "dataset.num_workers": 0,
    "train.global_batch_size": 2,
    "optimizer.lr": "1e-2",
    "logger.log_interval": 1,
}
# Megatron's own modules and torch's Adam, in fp32 over gloo.
_ON_CPU = {
    "model.transformer.transformer_impl": "local",
    "model.transformer.masked_softmax_fusion": "false",
    "model.transformer.bias_activation_fusion": "false",
    "model.transformer.bias_dropout_fusion": "false",
    "model.transformer.gradient_accumulation_fusion": "false",
    "model.transformer.apply_rope_fusion": "false",
    "model.transformer.persist_layer_norm": "false",
    "mixed_precision": "null",
    "dataset.pin_memory": "false",
    "dist.distributed_backend": "gloo",
    "ddp.use_distributed_optimizer": "false",
    "ddp.overlap_param_gather": "false",
    "optimizer.use_distributed_optimizer": "false",
}


def make_stores(folder: Path) -> list[str]:
    """Random documents to train on and to validate on; returns the overrides for them."""
    train = make_store(folder / "train")
    return overrides(train, make_store(folder / "valid", lengths=(60, 33, 80)))


def make_online_stores(folder: Path) -> dict[str, list[str]]:
    """A tiny target, its documents with features and without, and the overrides for either."""
    target = save_target(folder / "target")
    found = {}
    for name in ("features", "tokens"):
        stores = [
            save_store(folder / f"{name}-{split}", target, lengths, tokens_only=name == "tokens")
            for split, lengths in (("train", LENGTHS), ("valid", (60, 33, 80)))
        ]
        found[name] = overrides(*stores, target_layer_ids=TINY.target_layer_ids)
    found["tokens"].append(f"dataset.online_target={target}")
    return found


def overrides(
    train: FeatureStore, valid: FeatureStore, target_layer_ids: tuple[int, ...] | None = None
) -> list[str]:
    """What makes a recipe small enough, and one of these documents."""
    target = train.meta.target
    of_target = {
        "model.transformer.hidden_size": target.hidden_size,
        "model.vocab_size": target.vocab_size,
        "model.num_target_layers": target.num_layers,
        "model.target_layer_ids": list(target_layer_ids or train.meta.target_layer_ids),
        "model.mask_token_id": target.mask_token_id,
        "model.eos_token_ids": list(target.eos_token_ids),
        "model.pad_token_id": target.pad_token_id,
        "dataset.feature_store": train.path,
        "dataset.valid_feature_store": valid.path,
    }
    given = {**_DRAFTER, **_ON_CPU, **of_target}
    return [f"{name}={'null' if value is None else value}" for name, value in given.items()]
