"""Local attention kernels: one rank's keys against all queries, exact within a staircase.

Every kernel is a module or an object with the functions of `Kernel`. It sees neither ranks nor
collectives; forward and backward are partial over the keys it is given. Modules of kernels are
imported when they are selected.
"""

from megatron_splitkv.attention.kernels.interface import Kernel
from megatron_splitkv.attention.kernels.rules import Machine, Request, kernel_report, machine_of
from megatron_splitkv.attention.kernels.selection import find_kernel, select_kernel

__all__ = [
    "Kernel",
    "Machine",
    "Request",
    "find_kernel",
    "kernel_report",
    "machine_of",
    "select_kernel",
]
