"""The limits within which a process works that another one started for it, and how it begins.

They are the kernel's, so they hold also when the parent is gone: too much processor time is a SIGXCPU, too much memory
a MemoryError. An idle process ends when the parent closes the socket.
"""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Callable

CPU_S = 2  # for one piece of work, and a second more or less: the kernel counts whole ones
MEMORY_BYTES = 512 * 2**20  # of address space; an idle process has some 30 MiB


def run(serve: Callable[[socket.socket], None]) -> None:
    """Serve the socket that is standard input until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # which a SIGXCPU would leave behind
    with socket.socket(fileno=0) as connection:
        serve(connection)


def limit_cpu_time() -> None:
    """Allow so much from now on; what was used before is counted, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, hard))
