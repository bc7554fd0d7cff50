"""The drafter family: configuration, Megatron modules, model.

The configuration needs no Megatron; the rest is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_splitkv.data.meta import default_target_layer_ids
from megatron_splitkv.drafter.config import DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig
from megatron_splitkv.drafter.presets import PRESETS

if TYPE_CHECKING:
    from megatron_splitkv.drafter.model import DFlashModel
    from megatron_splitkv.drafter.specs import get_dflash_layer_spec
    from megatron_splitkv.drafter.transformer_config import check_transformer_config

_NEEDS_MEGATRON = {
    "DFlashModel": "megatron_splitkv.drafter.model",
    "check_transformer_config": "megatron_splitkv.drafter.transformer_config",
    "get_dflash_layer_spec": "megatron_splitkv.drafter.specs",
}

__all__ = [
    "PRESETS",
    "DFlashConfig",
    "DFlashModel",
    "DSparkConfig",
    "DominoConfig",
    "check_transformer_config",
    "default_target_layer_ids",
    "get_dflash_layer_spec",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_MEGATRON:
        return getattr(import_module(_NEEDS_MEGATRON[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
