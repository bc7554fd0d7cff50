"""Train a drafter by a NeMo recipe: Megatron-Bridge's ``pretrain()`` in place of Megatron's.

    torchrun --nproc-per-node 8 -m megatron_splitkv.recipes.pretrain qwen3-8b \\
        dataset.feature_store=data/train checkpoint.save=checkpoints train.train_iters=2000

What follows the recipe's name are Bridge's (Hydra's) overrides of any field; with
``dataset.online_target=FOLDER`` the target runs in the job.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from megatron_splitkv.config import ConfigError
from megatron_splitkv.recipes import RECIPES, load_recipe
from megatron_splitkv.train.launch import exit_on_config_error, quiet_imports

if TYPE_CHECKING:
    from megatron_splitkv.recipes.container import DFlashConfigContainer


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: without the program; of this process if None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_splitkv.recipes.pretrain",
        description="Train a DFlash drafter by a NeMo (Megatron-Bridge) recipe. Start it with "
        "torchrun.",
    )
    parser.add_argument("recipe", help=f"target of the drafter: {', '.join(RECIPES)}")
    parser.add_argument(
        "overrides", nargs="*", metavar="field=value", help="e.g. optimizer.lr=1e-3"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with fields that replace the recipe's"
    )
    parser.add_argument("--print-config", action="store_true", help="print the result and leave")
    return parser.parse_intermixed_args(argv)


def configure(
    recipe: str, config_file: str | None, overrides: Sequence[str]
) -> "DFlashConfigContainer":
    """Return a recipe's configuration with changes; Bridge checks it when it starts.

    Args:
        recipe: one of `RECIPES`.
        config_file: YAML with fields that replace the recipe's.
        overrides: ``field=value``, the last word.

    Raises:
        ConfigError: an unknown recipe or field, or a file that cannot be read.
    """
    config = load_recipe(recipe)
    from megatron.bridge.training.utils.omegaconf_utils import (
        OverridesError,
        process_config_with_overrides,
    )

    try:
        return process_config_with_overrides(config, config_file, list(overrides))
    except (OverridesError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the recipe cannot be changed so: {reason}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Configure, check, train."""
    args = parse(argv)
    with exit_on_config_error():
        with quiet_imports():
            config = configure(args.recipe, args.config, args.overrides)
            from megatron.bridge.training.pretrain import pretrain

            from megatron_splitkv.recipes.callbacks import DealPacks
            from megatron_splitkv.recipes.forward_step import BridgeForwardStep
        if args.print_config:
            config.print_yaml()
            return
        # What it would print is a GPT's.
        train_utils = import_module("megatron.bridge.training.utils.train_utils")
        setattr(train_utils, "report_theoretical_memory", lambda *_, **__: None)  # noqa: B010
        pretrain(config, BridgeForwardStep(), callbacks=[DealPacks()])


if __name__ == "__main__":
    main()
