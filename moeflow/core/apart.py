"""Runs a module in a process of its own, so that its imports and buffers take no memory afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress


def run_apart(module: str, order: bytes) -> Iterator[bytes]:
    """Run a module with an order on its stdin; yield the lines of its stdout. It ends when they are no longer read.

    Ctrl-C reaches this process alone. Raises: OSError if the process cannot be started.
    """
    command = [sys.executable, "-m", module]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(order)
            yield from process.stdout
        finally:
            process.kill()
