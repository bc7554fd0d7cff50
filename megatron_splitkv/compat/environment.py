"""What is installed, and whether it is a version that this package knows."""

import importlib
import importlib.util
import re

from megatron_splitkv.config import ConfigError

OLDEST_MEGATRON_CORE = (0, 18, 2)
FIRST_UNKNOWN_MEGATRON_CORE = (0, 20)


def check_environment() -> None:
    """Refuse a missing or unknown megatron-core, and one without what its training needs.

    Raises:
        ConfigError: naming what is installed, what is wanted, and how to get it.
    """
    wanted = "megatron-core >= {}, < {}".format(
        ".".join(map(str, OLDEST_MEGATRON_CORE)), ".".join(map(str, FIRST_UNKNOWN_MEGATRON_CORE))
    )
    version = megatron_core_version()
    if version is None:
        raise ConfigError(f"megatron-core is not installed; install {wanted}")
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
    if not OLDEST_MEGATRON_CORE <= release < FIRST_UNKNOWN_MEGATRON_CORE:
        raise ConfigError(f"megatron-core {version} is not supported; install {wanted}")
    if importlib.util.find_spec("megatron.training") is None:
        raise ConfigError(
            f"megatron-core {version} has no megatron.training; install {wanted} from PyPI, or put "
            "a Megatron-LM checkout of that version on PYTHONPATH"
        )
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError(
            "psutil is not installed and Megatron's checkpoint writer needs it; pip install psutil"
        )


def megatron_core_version() -> str | None:
    """The version of the megatron-core that would be imported, None if there is none."""
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as error:
        # Anything else that is missing is another package's fault, and its name says which.
        if error.name not in ("megatron", "megatron.core"):
            raise
        return None


def has_fused_optimizers() -> bool:
    """Whether Megatron found an Adam of Transformer Engine or apex."""
    return not importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER
