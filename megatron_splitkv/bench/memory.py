"""Peak resident memory of this process, as Linux counts it."""

from pathlib import Path

# Read at start-up by glibc. With them every large buffer is a mapping of its own that goes back to
# the system when it is freed, so that resident memory is what is held, not what once was.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_RESET_PEAK = "5"


class PeakMemory:
    """Counts from `restart` on.

    Attributes:
        base: resident bytes at the restart.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self.base = _status("VmRSS")

    def grown(self) -> int:
        """Bytes by which the peak since the restart exceeds what was resident then."""
        return max(0, _status("VmHWM") - self.base)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
