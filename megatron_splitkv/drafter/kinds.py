"""The kinds of drafters, by the name that a command line, a checkpoint and an export give them."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_splitkv.config import DRAFTERS, ConfigError, require_choice
from megatron_splitkv.drafter.config import KIND_KEY, DFlashConfig
from megatron_splitkv.drafter.domino_config import DominoConfig
from megatron_splitkv.drafter.dspark_config import DSparkConfig

if TYPE_CHECKING:
    from megatron_splitkv.drafter.model import DFlashModel

_CONFIGS: dict[str, type[DFlashConfig]] = {
    config.kind: config for config in (DFlashConfig, DominoConfig, DSparkConfig)
}
_MODELS = {
    "dflash": ("megatron_splitkv.drafter.model", "DFlashModel"),
    "domino": ("megatron_splitkv.drafter.domino", "DominoModel"),
    "dspark": ("megatron_splitkv.drafter.dspark", "DSparkModel"),
}


def config_class(kind: str) -> type[DFlashConfig]:
    """The configuration of a kind of drafter.

    Args:
        kind: one of `config.DRAFTERS`.

    Raises:
        ConfigError: unknown; the message lists the known ones.
    """
    return _CONFIGS[require_choice("drafter", kind, DRAFTERS)]


def model_class(kind: str) -> "type[DFlashModel]":
    """The Megatron model of a kind of drafter; imports Megatron.

    Args:
        kind: one of `config.DRAFTERS`.

    Raises:
        ConfigError: unknown; the message lists the known ones.
    """
    module, name = _MODELS[require_choice("drafter", kind, DRAFTERS)]
    found: type[DFlashModel] = getattr(import_module(module), name)
    return found


def config_from_json(text: str) -> DFlashConfig:
    """The configuration of whatever kind of drafter a JSON object describes.

    Args:
        text: of `DFlashConfig.to_json`, or with more keys, which are left to others.

    Raises:
        ConfigError: not a JSON object, an unknown kind, a missing key, or an impossible value.
    """
    try:
        kind = json.loads(text).get(KIND_KEY, DFlashConfig.kind)
    except (json.JSONDecodeError, AttributeError) as error:
        raise ConfigError(f"not a drafter configuration: {error}") from error
    return config_class(kind).from_json(text)


def load_config(path: str | os.PathLike[str]) -> DFlashConfig:
    """Read a file that `DFlashConfig.save` of any kind wrote.

    Raises:
        ConfigError: naming the file.
    """
    try:
        return config_from_json(Path(path).read_text())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
