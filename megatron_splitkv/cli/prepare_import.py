"""`splitkv prepare --from-specforge` and `--from-speculators`: another trainer's hidden states."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_splitkv.config import ConfigError

if TYPE_CHECKING:
    from megatron_splitkv.data.offline_data import OfflineData
    from megatron_splitkv.data.recipe_import import ImportRecipe


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name another trainer's data."""
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--from-specforge",
        type=Path,
        metavar="FOLDER",
        help="import SpecForge's offline data (*.ckpt, *.ckpt.gz) instead of reading text; the "
        "target (a folder) tells which layers it holds and gives its embedding and head",
    )
    sources.add_argument(
        "--from-speculators",
        type=Path,
        metavar="FOLDER",
        help="import speculators' offline data (an Arrow dataset with hidden_states/"
        "hs_*.safetensors) likewise; its layer ids are --target-layer-ids plus 1",
    )


def import_recipe(args: argparse.Namespace) -> "ImportRecipe | None":
    """The recipe that the options ask for; None if they name no other trainer's data.

    Args:
        args: of the parser that `add_import_arguments` has seen.

    Raises:
        ConfigError: options that do not go together, or no such data.
    """
    if args.from_specforge is None and args.from_speculators is None:
        return None
    option = "--from-specforge" if args.from_speculators is None else "--from-speculators"
    target = Path(args.target)
    if not target.exists():
        raise ConfigError(
            f"{option} needs --target FOLDER: the model that the states were made with "
            f"(--target is {args.target!r})"
        )
    for name in ("text", "regenerate"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name} does not go with {option}: its tokens and states belong together"
            )
    from megatron_splitkv.data.recipe_import import ImportRecipe

    return ImportRecipe(target, _data(args))


def _data(args: argparse.Namespace) -> "OfflineData":
    if args.from_specforge is not None:
        from megatron_splitkv.data.specforge import SpecForgeData

        return SpecForgeData(args.from_specforge)
    from megatron_splitkv.data.speculators_data import SpeculatorsData

    return SpeculatorsData(args.from_speculators)
