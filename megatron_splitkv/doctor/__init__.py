"""What is installed and what works here: the checks of `splitkv doctor`.

Everything that can crash or hang (a binary that does not fit, a network that does not answer) runs
in a process of its own with a time limit; the doctor reports what became of it.
"""

from megatron_splitkv.doctor.diagnosis import diagnose
from megatron_splitkv.doctor.findings import Diagnosis, Finding, Status

__all__ = ["Diagnosis", "Finding", "Status", "diagnose"]
