"""Export of trained drafters: Megatron checkpoints to the public z-lab (DFlash) layout."""

from megatron_splitkv.export.drafter import export_drafter
from megatron_splitkv.export.folder import read_drafter, write_drafter
from megatron_splitkv.export.zlab import from_zlab, to_zlab

__all__ = ["export_drafter", "from_zlab", "read_drafter", "to_zlab", "write_drafter"]
