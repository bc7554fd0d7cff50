"""NeMo recipes: a drafter's training as Megatron-Bridge configurations.

    from megatron_splitkv.recipes import qwen3_8b_dflash_splitkv_pretrain_config

`python -m megatron_splitkv.recipes.pretrain` starts one. Needs the extra ``nemo``; Megatron-Bridge
is imported when a recipe is asked for, so that a launcher may read the names without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from megatron_splitkv.config import ConfigError, require_choice

if TYPE_CHECKING:
    from megatron_splitkv.recipes.container import DFlashConfigContainer
    from megatron_splitkv.recipes.dflash import (
        OnlineOptions,
        qwen3_8b_dflash_splitkv_pretrain_config,
        qwen35_27b_dflash_splitkv_pretrain_config,
        qwen35_35b_a3b_dflash_splitkv_pretrain_config,
        qwen36_27b_dflash_splitkv_pretrain_config,
    )

# From the name of a drafter's preset to that of its recipe.
RECIPES: dict[str, str] = {
    "qwen3-8b": "qwen3_8b_dflash_splitkv_pretrain_config",
    "qwen3.5-35b-a3b": "qwen35_35b_a3b_dflash_splitkv_pretrain_config",
    "qwen3.5-27b": "qwen35_27b_dflash_splitkv_pretrain_config",
    "qwen3.6-27b": "qwen36_27b_dflash_splitkv_pretrain_config",
}

__all__ = [
    "RECIPES",
    "load_recipe",
    "qwen3_8b_dflash_splitkv_pretrain_config",
    "qwen35_27b_dflash_splitkv_pretrain_config",
    "qwen35_35b_a3b_dflash_splitkv_pretrain_config",
    "qwen36_27b_dflash_splitkv_pretrain_config",
]


def load_recipe(target_name: str, **online: "Unpack[OnlineOptions]") -> "DFlashConfigContainer":
    """Return the configuration of a target's recipe.

    Args:
        target_name: one of `RECIPES`.
        **online: target that runs in the job, see `recipes.dflash.OnlineOptions`.

    Raises:
        ConfigError: an unknown name, or Megatron-Bridge cannot be imported.
    """
    name = RECIPES[require_choice("recipe", target_name, RECIPES)]
    return _recipe(name)(**online)


def _recipe(name: str) -> Any:
    try:
        return getattr(import_module("megatron_splitkv.recipes.dflash"), name)
    except ImportError as error:
        raise ConfigError(
            f"Megatron-Bridge cannot be imported ({error}); a recipe needs it: pip install "
            "'megatron-splitkv[nemo]', or train with megatron_splitkv.pretrain_dflash"
        ) from error


def __getattr__(name: str) -> Any:
    if name in RECIPES.values():
        return _recipe(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
