"""Split-KV context parallelism for training speculative drafters on Megatron.

Importing the package patches nothing and needs neither a GPU, Transformer Engine nor apex.
"""

from megatron_splitkv.config import ConfigError

__version__ = "0.1.0"

__all__ = ["ConfigError", "__version__"]
