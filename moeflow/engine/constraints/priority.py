"""Lets threads beside an engine's passes have what these leave of the processor."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

COMPILING: Final = 5  # a quarter of what a thread of a pass gets
SLOW_MASKS: Final = 10  # a tenth


def lower(niceness: int, thread_id: int | None = None) -> None:
    """Lower the priority of a thread, by its native id; None: of the calling one. Only Linux knows threads apart."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread_id or threading.get_native_id(), niceness)
