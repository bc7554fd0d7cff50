"""Split-KV context parallelism for training speculative drafters on Megatron.

Importing the package patches nothing and needs neither a GPU, Transformer Engine nor apex.
"""

from typing import TYPE_CHECKING, Any

from megatron_splitkv.config import ConfigError

if TYPE_CHECKING:
    from megatron_splitkv.hooks import disable, enable

__version__ = "0.1.0"

__all__ = ["ConfigError", "__version__", "disable", "enable"]


def __getattr__(name: str) -> Any:
    if name in ("disable", "enable"):
        from megatron_splitkv import hooks  # loads torch

        return getattr(hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
