"""Export and import of drafters: Megatron checkpoints, the z-lab and the speculators layout."""

from megatron_splitkv.export.drafter import convert_drafter, export_drafter
from megatron_splitkv.export.folder import LAYOUTS, read_config, read_drafter, write_drafter
from megatron_splitkv.export.zlab import from_zlab, to_zlab

__all__ = [
    "LAYOUTS",
    "convert_drafter",
    "export_drafter",
    "from_zlab",
    "read_config",
    "read_drafter",
    "to_zlab",
    "write_drafter",
]
