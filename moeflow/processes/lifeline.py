"""What ties an engine's process to its parent: it shows that it runs, and ends at once when the parent is gone.

On Linux the kernel sees to the end, whatever the process does at that moment. Elsewhere a thread looks once a second,
also in the midst of a pass: kernels run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time

from moeflow.processes.pass_record import PassRecord

logger = logging.getLogger(__name__)

BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


class OrphanedError(Exception):
    """The parent is gone already."""


def tie_to_parent(parent_pid: int, record: PassRecord) -> None:
    """End this process when its parent is gone, and show in `record` that it runs.

    Raises: OrphanedError if the parent went before.
    """
    if sys.platform == "linux":
        # Sent when the *thread* that started this process ends. It runs the parent's event loop, the only reader of
        # results.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the kernel was asked
        raise OrphanedError("the parent process is gone")
    threading.Thread(target=_beat, args=(parent_pid, record), name="lifeline", daemon=True).start()


def _beat(parent_pid: int, record: PassRecord) -> None:
    while os.getppid() == parent_pid:
        record.tick()
        time.sleep(BEAT_S)
    logger.warning("the parent process is gone; stopping")
    os._exit(1)  # whatever the other threads do: the output has no reader
