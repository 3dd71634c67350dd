"""How much memory this process holds, and has held at most."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return what the process holds in RAM now, files it has mapped included."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> None:
    """Reset the peak to the memory in use now, where the system can do that."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes() -> int | None:
    """Return the most the process has held since `reset_peak`; None where the system does not report (not Linux)."""
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
