"""Everything about the recipes' configurations that needs Bridge but no training, as JSON."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.recipes.bridge_on_cpu import import_bridge
from tests.recipes.tiny import make_stores


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
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron_splitkv.recipes import load_recipe

    config = process_config_with_overrides(load_recipe("qwen3-8b"), None, list(overrides))
    runtime_config_update(config)
    return config


def accepted(folder: Path, stores: Sequence[str]) -> dict[str, Any]:
    """What a good launch looks like when it has been checked."""
    from megatron.bridge.data.base import DatasetBuildContext

    save = folder / "checkpoints"
    config = validated([*stores, f"checkpoint.save={save}", "train.train_iters=4"])
    cp_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    context = DatasetBuildContext(
        train_samples=8,
        valid_samples=4,
        test_samples=4,
        pg_collection=SimpleNamespace(cp=cp_group),
    )
    train, valid, test = config.dataset.build_datasets(context)
    return {
        "eval_iters": config.validation.eval_iters,
        "drafter_config": json.loads((save / "drafter_config.json").read_text())["target_id"],
        "train": len(train),
        "first_item": sorted(train[0])[0],
        "valid_repeats": valid[0]["block_tokens"].tolist() == valid[4]["block_tokens"].tolist(),
        "test": test,
    }


def main(folder: Path, refusals: dict[str, list[str]]) -> None:
    """Write ``folder / "found.json"``."""
    stores = [*make_stores(folder), "model.transformer.context_parallel_size=1"]
    import_bridge()
    found = {
        "recipes": recipes(folder),
        "accepted": accepted(folder, stores),
        "refused": {
            name: outcome(lambda changes=changes: validated([*stores, *changes]))
            for name, changes in refusals.items()
        },
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
