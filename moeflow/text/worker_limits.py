"""The limits within which a process works that another one started for it, and how it begins.

They are the kernel's, so they hold also when the parent is gone: too much processor time is a SIGPROF, too much memory
a MemoryError. An idle process ends when the parent closes the socket.
"""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable

CPU_S = 2.0  # for one piece of work
MEMORY_BYTES = 512 * 2**20  # of address space; an idle process has about 30 MiB


def run(serve: Callable[[socket.socket], None]) -> None:
    """Serve the socket that is standard input until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # which a crash would leave behind
    with socket.socket(fileno=0) as connection:
        serve(connection)


def limit_cpu_time(cpu_s: float = CPU_S) -> None:
    """Allow the process so much processor time from now on."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
