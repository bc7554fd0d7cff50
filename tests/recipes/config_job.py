"""Everything about the recipes' configurations that needs Bridge but no training, as JSON."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_splitkv.data.frozen import FROZEN_FILE
from tests.recipes.bridge_on_cpu import import_bridge
from tests.recipes.tiny import make_online_stores, make_stores

ONE_RANK = ("model.transformer.context_parallel_size=1",)


def recipes(folder: Path) -> dict[str, Any]:
    """What each recipe is, before and after a way through YAML."""
    from megatron_splitkv.drafter.config import DFlashConfig
    from megatron_splitkv.recipes import RECIPES, load_recipe
    from megatron_splitkv.recipes.container import DFlashConfigContainer

    found = {}
    for target in RECIPES:
        config = load_recipe(target)
        config.model.finalize()
        path = folder / f"{target}.yaml"
        config.to_yaml(str(path))
        again = DFlashConfigContainer.from_yaml(str(path))
        again.model.finalize()
        found[target] = {
            "parameters": config.model.dflash.num_parameters(),
            "is_preset": config.model.dflash == DFlashConfig.preset(target),
            "context_parallel_size": config.model.context_parallel_size,
            "cp_comm_type": config.model.cp_comm_type,
            "same_class": type(again) is DFlashConfigContainer,
            "same_drafter": again.model.dflash == config.model.dflash,
            "same_dict": again.to_dict() == config.to_dict(),
            "same_activation": again.model.activation_func is config.model.activation_func,
            "copy_is_a_model": type(deepcopy(config.model)) is type(config.model),
            "config_class": type(config).__name__,
            "refused_by_bridge": outcome(lambda config=again: _check_on_a_node(config)),
            "is_bf16": again.model.bf16 and again.optimizer.bf16,
        }
    return found


def _check_on_a_node(config: Any) -> None:
    """Bridge's own checks, as on a node of 8 GPUs; the store is left out."""
    from megatron.bridge.training.config import ConfigContainer, runtime_config_update

    config.validation.eval_iters = 0
    with (
        mock.patch.object(type(config), "validate", ConfigContainer.validate),
        mock.patch.dict(os.environ, WORLD_SIZE="8"),
    ):
        runtime_config_update(config)


def outcome(action: Callable[[], Any]) -> str:
    """The error's class and text, or nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def validated(overrides: Sequence[str]) -> Any:
    """The tiny recipe with overrides, checked as Bridge checks it before it starts."""
    from megatron.bridge.training.config import runtime_config_update

    from megatron_splitkv.recipes.pretrain import configure

    config = configure("qwen3-8b", None, overrides)
    runtime_config_update(config)
    return config


def accepted(folder: Path, stores: Sequence[str]) -> dict[str, Any]:
    """What a good launch looks like when it has been checked."""
    save = folder / "checkpoints"
    config = validated([*stores, f"checkpoint.save={save}", "train.train_iters=4"])
    train, valid, test = config.dataset.build_datasets(_context(8))
    return {
        "eval_iters": config.validation.eval_iters,
        "drafter_config": json.loads((save / "drafter_config.json").read_text())["target_id"],
        "train": len(train),
        "first_item": sorted(train[0])[0],
        "valid_repeats": valid[0]["block_tokens"].tolist() == valid[4]["block_tokens"].tolist(),
        "test": test,
    }


def _context(train_samples: int, num_replicas: int = 1) -> Any:
    """What Bridge hands to a provider of datasets."""
    from megatron.bridge.data.base import DatasetBuildContext

    groups = {"cp": 1, "dp": num_replicas}
    return DatasetBuildContext(
        train_samples=train_samples,
        valid_samples=4,
        test_samples=4,
        pg_collection=SimpleNamespace(
            **{
                name: SimpleNamespace(rank=lambda: 0, size=lambda size=size: size)
                for name, size in groups.items()
            }
        ),
    )


def online(folder: Path) -> dict[str, Any]:
    """What a target in the job hands out, and where what was asked for arrives."""
    from megatron_splitkv.recipes import load_recipe

    named = load_recipe("qwen3.6-27b", online_target="T", online_target_backend="megatron")
    launches = make_online_stores(folder)
    config = validated([*launches["tokens"], "model.target_layer_ids=[0,1,3]", *ONE_RANK])
    train, valid, _ = config.dataset.build_datasets(_context(8))
    target = config.dataset.open_target(None)
    features, final_hidden = target.states(np.arange(7), np.array([0, 7]), 0)
    with_features = validated([*launches["features"], *ONE_RANK])
    return {
        "fields": [named.dataset.online_target, named.dataset.online_target_backend],
        "unknown argument": outcome(lambda: load_recipe("qwen3-8b", target="T")),
        "backend": config.dataset.online_target_backend,
        "features": list(features.shape),
        "final_hidden": final_hidden,
        "online": [train.online, valid.online],
        "with features": with_features.dataset.open_target,
    }


def dealt(stores: Sequence[str]) -> dict[str, Any]:
    """Which packs two replicas get from Bridge's own sampler when a run goes on after four."""
    from megatron.bridge.data.samplers import build_pretraining_data_loader

    from megatron_splitkv.recipes.callbacks import DealPacks

    found: dict[str, Any] = {}
    batch, after, steps = 8, 4, 3
    for skip_train in ("false", "true"):
        config = validated(
            [
                *(*stores, f"train.global_batch_size={batch}"),
                f"validation.skip_train={skip_train}",
            ]
        )
        context = _context(after + steps * batch, num_replicas=2)
        found["not told"] = outcome(partial(config.dataset.build_datasets, context))
        state = SimpleNamespace(consumed_train_samples=after, consumed_valid_samples=6)
        DealPacks().on_data_init_start(
            SimpleNamespace(state=SimpleNamespace(train_state=state, cfg=config))
        )
        train, valid, _ = config.dataset.build_datasets(context)
        found[f"valid, skip_train {skip_train}"] = [valid.dealing.start, valid.dealing.period]
    loaders = [
        build_pretraining_data_loader(
            train,
            after,
            config.dataset.dataloader_type,
            config.train.micro_batch_size,
            num_workers=0,
            data_sharding=config.dataset.data_sharding,
            data_parallel_rank=replica,
            data_parallel_size=2,
            global_batch_size=batch,
        )
        for replica in range(2)
    ]
    indices = [[index for [index] in loader.batch_sampler] for loader in loaders]
    costs = train.dealing.document_cost
    found["replicas"] = [[train.dealing.item(i) for i in replica] for replica in indices]
    found["costs"] = [
        int(costs[train.packing.pack_documents(item)].sum()) for item in range(len(train))
    ]
    ramp = validated([*stores, "train.rampup_batch_size=[2,2,100]", "train.global_batch_size=8"])
    ramp.dataset.continue_after(0, 0)
    found["varying"] = ramp.dataset.build_datasets(context)[0].dealing is not None
    return found


def main(folder: Path, refusals: dict[str, list[str]]) -> None:
    """Write ``folder / "found.json"``."""
    stores = [*make_stores(folder), *ONE_RANK]
    frozen = shutil.copytree(folder / "train", folder / "damaged") / FROZEN_FILE
    content = frozen.read_bytes()
    frozen.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    import_bridge()
    found = {
        "recipes": recipes(folder),
        "accepted": accepted(folder, stores),
        "online": online(folder),
        "dealt": dealt(stores),
        "refused": {
            name: outcome(
                lambda changes=changes: validated(
                    [*stores, *(change.format(folder=folder) for change in changes)]
                )
            )
            for name, changes in refusals.items()
        },
        "groups": torch.distributed.is_initialized(),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
